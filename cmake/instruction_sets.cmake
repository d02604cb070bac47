# Sets JLP_ISAS: the instruction sets of x86-64 that kernels are compiled for, besides portable code, from JAXLOWPREC_ISAS:
#   all       what a wheel needs, which does not know its processor; the default
#   native    the set that dispatch.cc would choose on this machine's processor: what an editable installation needs
#   portable  none of them
# or some of avx2, avx512, avx512_bf16 and avx512_amx; the last two need avx512 and bring it along. A library without its
# processor's sets runs the best that it has.
#
# The processor is asked in every run of CMake: a build folder can have come from another machine.
cmake_minimum_required(VERSION 3.20)  # tests run this file by itself

set(JAXLOWPREC_ISAS "all" CACHE STRING "Instruction sets of x86-64: all, native, portable, or some of avx2, avx512, avx512_bf16, avx512_amx")

function(jlp_native_isa result)
  set(${result} all PARENT_SCOPE)
  if(CMAKE_CROSSCOMPILING)
    message(STATUS "JAXLOWPREC_ISAS=native: cross-compiling, so all instruction sets are built")
    return()
  endif()
  unset(jlp_status CACHE)
  unset(jlp_compiled CACHE)
  try_run(jlp_status jlp_compiled ${CMAKE_BINARY_DIR}/probe ${PROJECT_SOURCE_DIR}/cmake/native_isas.cc
          COMPILE_OUTPUT_VARIABLE said RUN_OUTPUT_VARIABLE isa)
  if(NOT jlp_compiled OR NOT jlp_status STREQUAL "0")
    message(STATUS "JAXLOWPREC_ISAS=native: this processor could not be asked, so all instruction sets are built: ${said}")
    return()
  endif()
  string(STRIP "${isa}" isa)
  set(${result} ${isa} PARENT_SCOPE)
endfunction()

function(jlp_choose_isas result)
  set(known avx2 avx512 avx512_amx avx512_bf16)
  string(REGEX REPLACE "[ ,]+" ";" isas "${JAXLOWPREC_ISAS}")
  if(isas STREQUAL "")
    set(isas all)
  endif()
  foreach(isa IN LISTS isas)
    if(NOT isa IN_LIST known AND NOT isa MATCHES "^(all|native|portable)$")
      message(FATAL_ERROR "JAXLOWPREC_ISAS is \"${JAXLOWPREC_ISAS}\"; needs all, native, portable, or some of avx2, avx512, avx512_bf16, avx512_amx")
    endif()
  endforeach()
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(isas "")
  endif()
  if("native" IN_LIST isas)
    jlp_native_isa(isa)
    list(APPEND isas ${isa})
  endif()
  if("all" IN_LIST isas)
    set(isas ${known})
  elseif("avx512_bf16" IN_LIST isas OR "avx512_amx" IN_LIST isas)
    list(APPEND isas avx512)
  endif()
  list(REMOVE_ITEM isas native portable)
  list(REMOVE_DUPLICATES isas)
  list(SORT isas)
  set(${result} ${isas} PARENT_SCOPE)
endfunction()

jlp_choose_isas(JLP_ISAS)
list(JOIN JLP_ISAS ", " names)
string(REGEX REPLACE "(.+)" ", \\1" names "${names}")
message(STATUS "CPU kernels: portable${names} (JAXLOWPREC_ISAS=${JAXLOWPREC_ISAS})")
