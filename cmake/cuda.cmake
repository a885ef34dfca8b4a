# Sets TE_CUDA_ENABLED from TE_WITH_CUDA and what is installed. No GPU is needed to compile.
set(TE_WITH_CUDA AUTO CACHE STRING "CUDA kernels for sm_90a: AUTO (when nvcc is found), ON (or fail), OFF")
set_property(CACHE TE_WITH_CUDA PROPERTY STRINGS AUTO ON OFF)

set(TE_CUDA_ENABLED OFF)
if(NOT TE_WITH_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_STANDARD 17)  # the newest that CMake 3.25 knows for nvcc; headers shared with .cu files keep to it
  if(TE_WITH_CUDA STREQUAL "AUTO")
    if(NOT CMAKE_CUDA_COMPILER)
      unset(CMAKE_CUDA_COMPILER CACHE)  # look again: a compiler may have come since the last time
    endif()
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER OR TE_WITH_CUDA STREQUAL "ON")
    enable_language(CUDA)  # says itself what is wrong with a compiler that is missing or does not work
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      set(TE_CUDA_ENABLED ON)
    elseif(TE_WITH_CUDA STREQUAL "AUTO")
      message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.9: not used")
    else()
      message(FATAL_ERROR "CUDA ${CMAKE_CUDA_COMPILER_VERSION} is too old: wanted 12.9 or newer, or TE_WITH_CUDA=OFF")
    endif()
  endif()
endif()
message(STATUS "CUDA kernels: ${TE_CUDA_ENABLED}")
