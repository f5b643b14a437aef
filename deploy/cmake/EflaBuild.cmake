# How every target of the project is compiled, and the two functions that declare them.

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

add_library(efla_compile_options INTERFACE)
target_compile_options(efla_compile_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-unused-parameter>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${EFLA_WERROR}>>:-Werror>)
# -O1 -g1: reports keep their lines, and a build takes half as long.
if(EFLA_SANITIZE)
  target_compile_options(efla_compile_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EFLA_SANITIZE} -fno-omit-frame-pointer -O1 -g1>)
  target_link_options(efla_compile_options INTERFACE -fsanitize=${EFLA_SANITIZE})
endif()

# efla_library(name folder HEADERS ... SOURCES ... PUBLIC ... PRIVATE ...)
#
# A static library of the files of one folder. Its include root holds a link to that folder and nothing else,
# so that a folder can include only what it links: a wrong include does not compile. HEADERS are public and
# must each compile alone; link PUBLIC what they include, everything else PRIVATE.
function(efla_library name folder)
  cmake_parse_arguments(ARG "" "" "HEADERS;SOURCES;PUBLIC;PRIVATE" ${ARGN})
  set(root ${PROJECT_BINARY_DIR}/include/${name})
  cmake_path(GET folder PARENT_PATH parent)
  file(MAKE_DIRECTORY ${root}/${parent})
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/${folder} ${root}/${folder} SYMBOLIC)
  list(TRANSFORM ARG_HEADERS PREPEND ${root}/${folder}/)
  list(TRANSFORM ARG_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/${folder}/)
  add_library(efla_${name} STATIC ${ARG_SOURCES})
  add_library(efla::${name} ALIAS efla_${name})
  target_sources(efla_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${root} FILES ${ARG_HEADERS})
  target_link_libraries(efla_${name} PUBLIC ${ARG_PUBLIC} PRIVATE efla_compile_options ${ARG_PRIVATE})
endfunction()

# efla_executable(name SOURCES ... LINK ...)
#
# With a build id, which tells builds of one version apart (server/build_id.h); not every compiler asks for it itself.
function(efla_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_options(${name} PRIVATE LINKER:--build-id)
  target_link_libraries(${name} PRIVATE efla_compile_options ${ARG_LINK})
endfunction()
