# The CPU paths' loops are vectorised. errno and floating-point traps are not observed, which changes no value.
set(TE_CPU_FLAGS -fno-math-errno -fno-trapping-math)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND TE_CPU_FLAGS -march=x86-64-v3)  # AVX2, FMA, F16C; the import raises where they are missing
endif()

# A compiler that is newer than those the project is checked with may warn of more, which is no reason not to build.
option(TE_WERROR "warnings of C++ are errors" OFF)
set(TE_WARNINGS -Wall -Wextra)
if(TE_WERROR)
  list(APPEND TE_WARNINGS -Werror -Wno-error=stringop-overread)  # g++ 14: in copies of a vector of one element
endif()
