# Fails when a program shares protobuf's symbols with SentencePiece's library, which carries an older protobuf of its
# own: neither may the program take them from there, nor may the library find the program's.
# usage: cmake -D NM=nm -D PROGRAM=... -P foreign_symbols_test.cmake
cmake_minimum_required(VERSION 3.25)

function(dynamic_symbols out kind)
  execute_process(COMMAND ${NM} -D -C --${kind}-only ${PROGRAM} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${symbols}" PARENT_SCOPE)
endfunction()

dynamic_symbols(taken undefined)
if(NOT taken MATCHES "GLIBC")
  message(FATAL_ERROR "${PROGRAM} takes nothing from the C library: is it a program of this build?")
endif()
string(REGEX MATCHALL "[^\n]*google::protobuf[^\n]*" taken_protobuf "${taken}")
dynamic_symbols(given defined)
string(REGEX MATCHALL "[^\n]*(google::protobuf|FLAGS_)[^\n]*" given_protobuf "${given}")
foreach(found IN LISTS taken_protobuf given_protobuf)
  message("${found}")
endforeach()
if(taken_protobuf OR given_protobuf)
  message(FATAL_ERROR "${PROGRAM} shares protobuf symbols with shared libraries; see deploy/cmake/EflaPackages.cmake")
endif()
