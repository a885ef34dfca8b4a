# PyTorch as the extension and the policies of tests/layer are built against it, by path: find_package(Torch) would ask for
# a CUDA toolkit when torch is a CUDA build. Sets te_torch_version, te_torch_abi, te_torch_lib and te_torch_include.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# The minor versions that are served; pyproject.toml says the same (tests/policy/test_torch_private.py).
set(te_torch_first 2.9)
set(te_torch_end 2.16)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py ${te_torch_first} ${te_torch_end}
  OUTPUT_VARIABLE te_torch OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_VARIABLE te_torch_error ERROR_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE te_torch_failed)
if(te_torch_failed)
  message(FATAL_ERROR "${te_torch_error}")
endif()
string(REPLACE ";" "|" te_torch "${te_torch}")
string(REPLACE "\n" ";" te_torch "${te_torch}")
list(GET te_torch 0 te_torch_version)
list(GET te_torch 1 te_torch_abi)
list(GET te_torch 2 te_torch_lib)
list(GET te_torch 3 te_torch_include)
string(REPLACE "|" ";" te_torch_include "${te_torch_include}")
message(STATUS "PyTorch ${te_torch_version}: ${te_torch_lib}")

