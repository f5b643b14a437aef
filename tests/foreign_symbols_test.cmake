# Fails when a program shares symbols of protobuf, Abseil or gRPC with a shared library. SentencePiece's carries an older
# protobuf of its own: neither may the program take them from there, nor may the library find the program's.
# usage: cmake -D NM=nm -D PROGRAM=... -P foreign_symbols_test.cmake
cmake_minimum_required(VERSION 3.25)

execute_process(COMMAND ${NM} -D -C ${PROGRAM} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES " U [^\n]*GLIBC")
  message(FATAL_ERROR "${PROGRAM} takes nothing from the C library: is it a program of this build?")
endif()
string(REGEX MATCHALL "[^\n]*(google::protobuf|absl::lts_|grpc::|grpc_core::| (FLAGS|upb|grpc|gpr)_)[^\n]*" shared
  "${symbols}")
list(FILTER shared EXCLUDE REGEX " w TLS init function for ")  # weak and undefined, whoever links gRPC
if(shared)
  list(LENGTH shared count)
  list(SUBLIST shared 0 10 first)
  list(JOIN first "\n" first)
  message(FATAL_ERROR
    "${PROGRAM} shares ${count} symbols with shared libraries; see deploy/cmake/EflaPackages.cmake\n${first}")
endif()
