"""The modules: parameters, options and state. functional/ and the C++ below it compute."""
