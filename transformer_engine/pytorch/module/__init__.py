"""The modules: parameters, options and state. What they compute is in functional/ and in the C++ below it."""
