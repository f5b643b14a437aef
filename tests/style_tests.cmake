# Tests that read the sources and the build's structure instead of running the programs. Label: style.
set(style_script_folder ${CMAKE_CURRENT_SOURCE_DIR})

function(efla_style_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS style TIMEOUT 120 SKIP_REGULAR_EXPRESSION "^SKIPPED")
endfunction()

# Includes point downwards (layering_test.cmake has the rules), and the check does find what it is to find.
efla_style_test(LayeringTest.IncludesKeepTheirPlace
  ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -P ${style_script_folder}/layering_test.cmake)
set(misplaced ${CMAKE_CURRENT_BINARY_DIR}/misplaced)
file(WRITE ${misplaced}/model/misplaced.cc "#include <vector>\n# include <grpcpp/grpcpp.h>\n")
file(WRITE ${misplaced}/kernels/misplaced.h "#include \"model/model.h\"\n")
file(WRITE ${misplaced}/server/engine/misplaced.h "#include <hiredis/hiredis.h>\n#include \"server/sessions/context.h\"\n")
foreach(finding "model/misplaced.cc: grpcpp/grpcpp.h" "kernels/misplaced.h: model/model.h"
                "server/engine/misplaced.h: hiredis/hiredis.h" "server/engine/misplaced.h: server/sessions/context.h")
  string(MAKE_C_IDENTIFIER ${finding} id)
  efla_style_test(LayeringTest.Finds_${id}
    ${CMAKE_COMMAND} -D ROOT=${misplaced} -P ${style_script_folder}/layering_test.cmake)
  set_tests_properties(LayeringTest.Finds_${id} PROPERTIES PASS_REGULAR_EXPRESSION ${finding})
endforeach()

# Libraries link downwards too: no library of a folder on the left links one that is not on its right.
set(may_link_kernels "")
set(may_link_chat_template "")
set(may_link_model kernels chat_template)
set(may_link_constraint kernels model)
set(may_link_engine kernels model)
set(may_link_sessions kernels model engine)
set(may_link_serving kernels model constraint engine sessions)
set(may_link_rpc kernels model engine sessions serving proto)
set(may_link_client proto)
set(may_link_proto "")
set(link_lines)
foreach(library kernels chat_template model constraint engine sessions serving rpc client proto)
  if(NOT TARGET efla_${library})
    continue()
  endif()
  get_target_property(linked efla_${library} LINK_LIBRARIES)
  foreach(item IN LISTS linked)
    if(item MATCHES "^efla(::|_)([a-z_]+)$")
      set(used ${CMAKE_MATCH_2})
      if(NOT used IN_LIST may_link_${library} AND NOT used MATCHES "^(compile_options|rpc_packages)$")
        list(APPEND link_lines "efla_${library} links efla_${used}")
      endif()
    endif()
    if(item MATCHES "^gRPC|^efla_rpc_packages|^protobuf" AND NOT library MATCHES "^(proto|rpc|client)$")
      list(APPEND link_lines "efla_${library} links ${item}")
    endif()
  endforeach()
endforeach()
list(JOIN link_lines "; " link_lines)
efla_style_test(LayeringTest.LibrariesLinkDownwards
  ${CMAKE_COMMAND} -D "FINDINGS=${link_lines}" -P ${style_script_folder}/no_findings.cmake)

find_program(CLANG_FORMAT NAMES clang-format-14)
efla_style_test(FormatTest.SourcesAreFormatted
  ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -D CLANG_FORMAT=${CLANG_FORMAT}
  -P ${style_script_folder}/format_test.cmake)
find_program(SHELLCHECK shellcheck)
efla_style_test(FormatTest.ScriptsPassShellcheck
  ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -D SHELLCHECK=${SHELLCHECK}
  -P ${style_script_folder}/shellcheck_test.cmake)

# `format` rewrites the sources, `tidy` runs clang-tidy over all that is compiled here but generated code and tests.
if(CLANG_FORMAT)
  add_custom_target(format COMMAND ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -D CLANG_FORMAT=${CLANG_FORMAT}
    -D REWRITE=ON -P ${style_script_folder}/format_test.cmake VERBATIM)
endif()
find_program(RUN_CLANG_TIDY NAMES run-clang-tidy-14)
if(RUN_CLANG_TIDY)
  add_custom_target(tidy COMMAND ${RUN_CLANG_TIDY} -quiet -p ${PROJECT_BINARY_DIR}
    "^${PROJECT_SOURCE_DIR}/(kernels|model|server|client)/.*\\.cc$" VERBATIM USES_TERMINAL)
  if(EFLA_RPC)
    add_dependencies(tidy efla_proto)  # generated headers
  endif()
endif()
