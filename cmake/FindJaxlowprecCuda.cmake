# Finds a CUDA compiler, its static runtime and cuBLASLt's header, and shows by compiling probe.cu that they work here.
#
# The compiler is the first that works of: CUDACXX, CUDA_HOME, CUDA_PATH, the PyPI packages of Python's environment
# (nvidia-cuda-nvcc 13 and what it requires; PyPI has no nvcc of CUDA 12), nvcc on the path, /usr/local/cuda.
# cublasLt.h is the first that is new enough of: JAXLOWPREC_CUBLAS_INCLUDE, beside the compiler, PyPI's nvidia-cublas or
# nvidia-cublas-cu12, which JAX installs too. Only headers: at run time cuBLASLt is the copy that JAX has loaded.
#
# Not CMake's CUDA language: it would stop the configuration where a compiler is odd, and it looks for a toolkit's folders.
#
# Sets JaxlowprecCuda_FOUND, and _REASON if it is false; _NVCC, _VERSION, _FLAGS, _GENCODE, _INCLUDE_DIRS, _CUDART.

set(JAXLOWPREC_CUDA_ARCHS "80;90a;100f;120f" CACHE STRING "GPU architectures to compile machine code for")
set(JAXLOWPREC_CUDA_PTX "90" CACHE STRING "Architecture of the portable code, for GPUs that have no machine code; or empty")
set(JAXLOWPREC_CUBLAS_INCLUDE "" CACHE PATH "Folder of cublasLt.h; default: looked for")
option(JAXLOWPREC_CUDA_STRICT "Warnings, register spills and local memory in CUDA code are errors" OFF)

set(jlp_least_cuda 12.9)  # sm_100f, sm_120f; cuBLASLt's scales of FP8 blocks
set(jlp_probe ${CMAKE_CURRENT_LIST_DIR}/probe.cu)

# Every operation rounded on its own and subnormals flushed, as on the CPU (numerics.md 1).
set(JaxlowprecCuda_FLAGS -std=c++17 -O3 --fmad=false -ftz=true -prec-div=true -prec-sqrt=true
                         -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas -Xptxas=-warn-spills,-warn-lmem-usage)
if(JAXLOWPREC_CUDA_STRICT)
  list(APPEND JaxlowprecCuda_FLAGS -Werror=all-warnings -Xcompiler=-Werror -Xptxas=-Werror)
endif()
if(NOT DEFINED ENV{NVCC_CCBIN} AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  list(APPEND JaxlowprecCuda_FLAGS -ccbin=${CMAKE_CXX_COMPILER})
endif()
set(JaxlowprecCuda_GENCODE "")
foreach(arch IN LISTS JAXLOWPREC_CUDA_ARCHS)
  list(APPEND JaxlowprecCuda_GENCODE -gencode=arch=compute_${arch},code=sm_${arch})
endforeach()
foreach(arch IN LISTS JAXLOWPREC_CUDA_PTX)
  list(APPEND JaxlowprecCuda_GENCODE -gencode=arch=compute_${arch},code=compute_${arch})
endforeach()

# The `nvidia` folders of the building Python and of the environment that it builds for: pip's isolated builds hide the
# latter's packages, but sysconfig still names its folder.
function(jlp_nvidia_packages result)
  find_package(Python 3.11 QUIET COMPONENTS Interpreter)
  set(folders "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import sys, sysconfig; print(*dict.fromkeys([*sys.path, *map(sysconfig.get_path, ('purelib', 'platlib'))]), sep=';')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    foreach(folder IN LISTS found)
      if(IS_DIRECTORY "${folder}/nvidia")
        list(APPEND folders "${folder}/nvidia")
      endif()
    endforeach()
  endif()
  set(${result} "${folders}" PARENT_SCOPE)
endfunction()

function(jlp_compilers result packages)
  set(found $ENV{CUDACXX})
  foreach(root IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
    if(root)
      list(APPEND found "${root}/bin/nvcc")
    endif()
  endforeach()
  foreach(folder IN LISTS packages)
    file(GLOB versions "${folder}/cu[1-9]*/bin/nvcc")
    list(SORT versions COMPARE NATURAL ORDER DESCENDING)
    list(APPEND found ${versions})
  endforeach()
  find_program(jlp_nvcc_on_path nvcc)
  if(jlp_nvcc_on_path)
    list(APPEND found ${jlp_nvcc_on_path})
  endif()
  unset(jlp_nvcc_on_path CACHE)
  if(EXISTS /usr/local/cuda/bin/nvcc)
    list(APPEND found /usr/local/cuda/bin/nvcc)
  endif()
  list(REMOVE_DUPLICATES found)
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# Whether a compiler works: sets `reason` to why not, else to nothing, and `version`, `include`, `cudart`.
function(jlp_try_compiler nvcc)
  set(reason "" PARENT_SCOPE)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  if(failed OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(reason "does not run" PARENT_SCOPE)
    return()
  endif()
  set(version ${CMAKE_MATCH_1})
  set(version ${version} PARENT_SCOPE)
  if(version VERSION_LESS jlp_least_cuda)
    set(reason "is of CUDA ${version}; ${jlp_least_cuda} or newer is needed" PARENT_SCOPE)
    return()
  endif()
  # Where a compiler has its headers and libraries only it knows: wrappers, distributions and PyPI differ.
  execute_process(COMMAND ${nvcc} --dryrun -c ${jlp_probe} OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REGEX MATCH "TOP=([^\n]*)" line "${text}")
  set(folders "${CMAKE_MATCH_1}/include")
  set(libraries "${CMAKE_MATCH_1}/lib" "${CMAKE_MATCH_1}/lib64")
  string(REGEX MATCHALL "\"-[IL][^\"]+\"" options "${text}")
  foreach(option IN LISTS options)
    string(REGEX REPLACE "^\"-.(.*)\"$" "\\1" folder "${option}")
    if(option MATCHES "^\"-I")
      list(APPEND folders "${folder}")
    else()
      list(APPEND libraries "${folder}")
    endif()
  endforeach()
  find_path(jlp_include cuda_runtime.h PATHS ${folders} NO_DEFAULT_PATH)
  find_file(jlp_cudart libcudart_static.a PATHS ${libraries} NO_DEFAULT_PATH)
  set(include ${jlp_include})
  set(cudart ${jlp_cudart})
  unset(jlp_include CACHE)
  unset(jlp_cudart CACHE)
  if(NOT include OR NOT cudart)
    set(reason "has no cuda_runtime.h or no libcudart_static.a" PARENT_SCOPE)
    return()
  endif()
  file(REAL_PATH "${include}" include)
  file(REAL_PATH "${cudart}" cudart)
  set(include ${include} PARENT_SCOPE)
  set(cudart ${cudart} PARENT_SCOPE)
  # The compilation takes seconds: once for a compiler and its flags.
  set(key "${nvcc};${version};${JaxlowprecCuda_FLAGS};${JaxlowprecCuda_GENCODE}")
  if("${key}" STREQUAL "$CACHE{jlp_probed}")
    return()
  endif()
  set(folder ${CMAKE_BINARY_DIR}/probe)
  file(MAKE_DIRECTORY ${folder})
  execute_process(
    COMMAND ${nvcc} ${JaxlowprecCuda_FLAGS} ${JaxlowprecCuda_GENCODE} -c ${jlp_probe} -o ${folder}/probe.o
    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  if(NOT failed)
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -shared -Wl,-z,defs ${folder}/probe.o ${cudart} -ldl -lrt -lpthread -o ${folder}/probe.so
      OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  endif()
  if(failed)
    string(REGEX REPLACE "[\r\n\t ]+" " " text "${text}")
    string(SUBSTRING "${text}" 0 1000 text)
    set(reason "cannot compile a kernel: ${text}" PARENT_SCOPE)
    return()
  endif()
  set(jlp_probed "${key}" CACHE INTERNAL "")
endfunction()

# Sets `include` to the folder of cublasLt.h, or `reason`.
function(jlp_find_cublas beside packages major)
  set(reason "cublasLt.h was not found" PARENT_SCOPE)
  set(folders ${JAXLOWPREC_CUBLAS_INCLUDE} ${beside})
  foreach(folder IN LISTS packages)
    list(APPEND folders ${folder}/cu${major}/include ${folder}/cublas/include)
    file(GLOB others ${folder}/cu[1-9]*/include)
    list(APPEND folders ${others})
  endforeach()
  foreach(folder IN LISTS folders)
    if(NOT EXISTS ${folder}/cublasLt.h OR NOT EXISTS ${folder}/cublas_api.h)
      continue()
    endif()
    file(STRINGS ${folder}/cublas_api.h lines REGEX "#define CUBLAS_VER_(MAJOR|MINOR) ")
    string(REGEX REPLACE ".*MAJOR +([0-9]+).*MINOR +([0-9]+).*" "\\1.\\2" version "${lines}")
    if(version VERSION_LESS jlp_least_cuda)
      set(reason "${folder}/cublasLt.h is of cuBLAS ${version}; ${jlp_least_cuda} or newer is needed" PARENT_SCOPE)
      continue()
    endif()
    set(reason "" PARENT_SCOPE)
    set(include ${folder} PARENT_SCOPE)
    return()
  endforeach()
endfunction()

function(jlp_find_cuda)
  if(CMAKE_CROSSCOMPILING OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(JaxlowprecCuda_REASON "only built on Linux, for the machine itself" PARENT_SCOPE)
    return()
  endif()
  jlp_nvidia_packages(packages)
  jlp_compilers(compilers "${packages}")
  set(nvcc "")
  set(refused "")
  foreach(compiler IN LISTS compilers)
    jlp_try_compiler(${compiler})
    if(NOT reason)
      set(nvcc ${compiler})
      break()
    endif()
    string(APPEND refused "; ${compiler} ${reason}")
  endforeach()
  if(NOT nvcc)
    set(JaxlowprecCuda_REASON "no CUDA compiler (nvcc) was found that works${refused}" PARENT_SCOPE)
    return()
  endif()
  set(toolkit ${include})
  string(REGEX REPLACE "\\..*" "" major ${version})
  jlp_find_cublas(${toolkit} "${packages}" ${major})
  if(reason)
    set(JaxlowprecCuda_REASON "${reason}, for ${nvcc}" PARENT_SCOPE)
    return()
  endif()
  set(JaxlowprecCuda_NVCC ${nvcc} PARENT_SCOPE)
  set(JaxlowprecCuda_VERSION ${version} PARENT_SCOPE)
  set(JaxlowprecCuda_CUDART ${cudart} PARENT_SCOPE)
  set(folders ${toolkit} ${include})
  list(REMOVE_DUPLICATES folders)
  set(JaxlowprecCuda_INCLUDE_DIRS ${folders} PARENT_SCOPE)
  set(JaxlowprecCuda_FOUND TRUE PARENT_SCOPE)
endfunction()

set(JaxlowprecCuda_FOUND FALSE)
set(JaxlowprecCuda_REASON "")
jlp_find_cuda()

# The objects of .cu files, compiled again when a header of theirs changes.
set(CMAKE_CUDA_COMPILER_LAUNCHER "$ENV{CMAKE_CUDA_COMPILER_LAUNCHER}" CACHE STRING "What runs nvcc, such as ccache")

function(jlp_compile_cuda result)
  set(objects "")
  foreach(source IN LISTS ARGN)
    get_filename_component(name ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda
      COMMAND ${CMAKE_CUDA_COMPILER_LAUNCHER} ${JaxlowprecCuda_NVCC} ${JaxlowprecCuda_FLAGS} ${JaxlowprecCuda_GENCODE} -MD -MF ${object}.d -MT ${object}
              -c ${source} -o ${object}
      DEPENDS ${source}
      DEPFILE ${object}.d
      COMMENT "Compiling ${name}.cu for ${JAXLOWPREC_CUDA_ARCHS}"
      VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set(${result} "${objects}" PARENT_SCOPE)
endfunction()
