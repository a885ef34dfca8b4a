# PyTorch as the extension and the policies of tests/layer are built against it, by path: find_package(Torch) would ask for
# a CUDA toolkit when torch is a CUDA build. Sets te_torch_version, te_torch_abi, te_torch_lib, te_torch_include and
# te_torch_definitions.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

# The minor versions that are served; pyproject.toml has the same (tests/policy/test_torch_private.py).
set(te_torch_first 2.9)
set(te_torch_end 2.16)
if(TE_TORCH)  # of the build backend: what find_torch.py prints in the environment that the package goes to
  set(te_torch ${TE_TORCH})
else()
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_torch.py ${te_torch_first} ${te_torch_end}
    OUTPUT_VARIABLE te_torch OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE te_torch_error ERROR_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE te_torch_failed)
  if(te_torch_failed)
    message(FATAL_ERROR "${te_torch_error}")
  endif()
  string(REPLACE "\n" ";" te_torch "${te_torch}")
endif()
list(POP_FRONT te_torch te_torch_version te_torch_abi te_torch_lib)
set(te_torch_include ${te_torch})
# PyGILState_Ensure() in place of pybind11's own: its exceptions hold the GIL in a function that every unit gets, and with
# it all of pybind11's core.
set(te_torch_definitions
  _GLIBCXX_USE_CXX11_ABI=${te_torch_abi} TORCH_API_INCLUDE_EXTENSION_H PYBIND11_SIMPLE_GIL_MANAGEMENT)
message(STATUS "PyTorch ${te_torch_version}: ${te_torch_lib}")

