# Sets TE_CUDA_ENABLED from TE_WITH_CUDA and what is installed. No GPU is needed to compile. A compiler that is there and
# cannot be used is an error, not a build without kernels.
set(TE_WITH_CUDA AUTO CACHE STRING "CUDA kernels for sm_90a: AUTO (when nvcc is found), ON (or fail), OFF")
set_property(CACHE TE_WITH_CUDA PROPERTY STRINGS AUTO ON OFF)

set(TE_CUDA_ENABLED OFF)
if(NOT TE_WITH_CUDA STREQUAL "OFF")
  set(CMAKE_CUDA_ARCHITECTURES 90a)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_STANDARD 17)  # the newest of CMake 3.25 for nvcc; headers shared with .cu files keep to it
  if(CMAKE_CUDA_COMPILER)
    set(te_nvcc ${CMAKE_CUDA_COMPILER})
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(te_nvcc $ENV{CUDACXX})
  else()
    find_program(te_nvcc NAMES nvcc PATHS /usr/local/cuda/bin NO_CACHE)
  endif()
  if(te_nvcc)
    execute_process(COMMAND ${te_nvcc} --version OUTPUT_VARIABLE te_nvcc_said ERROR_QUIET RESULT_VARIABLE te_nvcc_failed)
    if(te_nvcc_failed)
      message(FATAL_ERROR "${te_nvcc} does not run (${te_nvcc_failed}): name another nvcc by CUDACXX, or build for the CPU "
        "alone, CMAKE_ARGS=-DTE_WITH_CUDA=OFF")
    endif()
    string(REGEX MATCH "release ([0-9.]+)" te_nvcc_release "${te_nvcc_said}")
    if(CMAKE_MATCH_1 VERSION_LESS 12.9)
      message(FATAL_ERROR "${te_nvcc} is CUDA ${CMAKE_MATCH_1}, wanted 12.9 or newer: name a newer nvcc by CUDACXX, or "
        "build for the CPU alone, CMAKE_ARGS=-DTE_WITH_CUDA=OFF")
    endif()
    set(CMAKE_CUDA_COMPILER ${te_nvcc})
    enable_language(CUDA)  # its own error names a compiler that does not work
    set(TE_CUDA_ENABLED ON)
  elseif(TE_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TE_WITH_CUDA=ON, and there is no nvcc on PATH or in /usr/local/cuda/bin: name one by CUDACXX")
  endif()
endif()
message(STATUS "CUDA kernels: ${TE_CUDA_ENABLED}")
