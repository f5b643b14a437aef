# The packages the project stands on, and the one way each is linked.

find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(hwy CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(CLI11 CONFIG QUIET)
find_package(OpenSSL REQUIRED)
find_package(ZLIB REQUIRED)
find_package(PkgConfig REQUIRED)
find_library(SENTENCEPIECE_LIB sentencepiece REQUIRED)
find_package(spdlog CONFIG REQUIRED)
pkg_check_modules(HIREDIS REQUIRED IMPORTED_TARGET hiredis)  # its CMake config is broken in Debian 12

# xxHash as a header: its functions are inlined, and none of its symbols is left to meet another copy's.
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
add_library(xxhash_header_only INTERFACE)
add_library(xxhash::header_only ALIAS xxhash_header_only)
target_include_directories(xxhash_header_only SYSTEM INTERFACE ${XXHASH_INCLUDE_DIR})
target_compile_definitions(xxhash_header_only INTERFACE XXH_INLINE_ALL)

# Abseil from its archives in every executable: the package's targets name the shared libraries, and a program
# with both would have two Abseils.
get_property(imported_targets DIRECTORY PROPERTY IMPORTED_TARGETS)
list(FILTER imported_targets INCLUDE REGEX "^absl::")
foreach(target IN LISTS imported_targets)
  get_target_property(location ${target} IMPORTED_LOCATION_NONE)
  if(location)
    string(REGEX REPLACE "[.]so[.0-9]*$" ".a" location "${location}")
    set_target_properties(${target} PROPERTIES IMPORTED_LOCATION_NONE ${location})
  endif()
endforeach()

# SentencePiece comes last on every link line, wherever CMake would put a dependency: see efla_rpc_packages.
set(CMAKE_CXX_STANDARD_LIBRARIES "${CMAKE_CXX_STANDARD_LIBRARIES} -Wl,--as-needed ${SENTENCEPIECE_LIB}")

# efla_rpc_packages: gRPC, protobuf and Abseil from their archives, hidden, for executables.
#
# libsentencepiece.so exports a protobuf-lite and command-line flags of its own. Symbols of one name would bind
# across the two and corrupt each other, so an executable takes its own copies from archives, keeps them out of
# its dynamic symbol table, and links them before SentencePiece. efla_proto brings them to all that need them;
# tests/foreign_symbols_test.cmake guards it.
add_library(efla_rpc_packages INTERFACE)
if(EFLA_RPC)
  find_package(Protobuf REQUIRED)
  find_package(gRPC CONFIG REQUIRED)
  find_package(prometheus-cpp CONFIG REQUIRED)
  pkg_check_modules(GRPCPP REQUIRED grpc++)
  pkg_check_modules(LIBEDIT REQUIRED IMPORTED_TARGET libedit)
  set(rpc_archives ${GRPCPP_STATIC_LIBRARIES})
  list(REVERSE rpc_archives)
  list(REMOVE_DUPLICATES rpc_archives)  # keep each library's last place
  list(REVERSE rpc_archives)
  list(REMOVE_ITEM rpc_archives ssl crypto dl pthread rt atomic z)
  list(PREPEND rpc_archives grpc++_reflection protobuf)
  list(TRANSFORM rpc_archives PREPEND lib OUTPUT_VARIABLE rpc_hidden)
  list(TRANSFORM rpc_hidden APPEND .a)
  list(JOIN rpc_hidden ":" rpc_hidden)  # named, not ALL: that would hide a sanitizer's run time as well
  list(TRANSFORM rpc_archives PREPEND -l)
  target_link_libraries(efla_rpc_packages INTERFACE
    -Wl,-Bstatic ${rpc_archives} -Wl,-Bdynamic -Wl,--exclude-libs,${rpc_hidden}
    OpenSSL::SSL OpenSSL::Crypto ZLIB::ZLIB Threads::Threads)
  # What our own files instantiate of protobuf's templates is hidden likewise.
  target_compile_options(efla_rpc_packages INTERFACE -fvisibility=hidden -fvisibility-inlines-hidden)
endif()
