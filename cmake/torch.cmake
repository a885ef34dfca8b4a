# PyTorch as the extension and the policies of tests/layer are built against it, by path: find_package(Torch) would ask for
# a CUDA toolkit when torch is a CUDA build. Sets te_torch_version, te_torch_abi, te_torch_lib and te_torch_include.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import torch, torch.utils.cpp_extension as e; print(torch.__version__.split('+')[0]); print(int(torch._C._GLIBCXX_USE_CXX11_ABI)); print(e.TORCH_LIB_PATH); print(';'.join(e.include_paths()))"
  OUTPUT_VARIABLE te_torch OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE te_torch_failed)
if(te_torch_failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch: install it first, and build with --no-build-isolation")
endif()
string(REPLACE ";" "|" te_torch "${te_torch}")
string(REPLACE "\n" ";" te_torch "${te_torch}")
list(GET te_torch 0 te_torch_version)
list(GET te_torch 1 te_torch_abi)
list(GET te_torch 2 te_torch_lib)
list(GET te_torch 3 te_torch_include)
string(REPLACE "|" ";" te_torch_include "${te_torch_include}")
message(STATUS "PyTorch ${te_torch_version}: ${te_torch_lib}")

