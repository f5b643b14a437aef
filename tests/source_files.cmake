# source_files(out pattern...): the project's own files under ROOT whose names match one of the globs: what git
# tracks or would track, or where there is no repository, everything outside the build folder.
function(source_files out)
  find_program(GIT git)
  set(files)
  if(GIT AND EXISTS ${ROOT}/.git)
    execute_process(COMMAND ${GIT} -C ${ROOT} ls-files --cached --others --exclude-standard -- ${ARGN}
      OUTPUT_VARIABLE files OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    string(REPLACE "\n" ";" files "${files}")
  else()
    list(TRANSFORM ARGN PREPEND ${ROOT}/ OUTPUT_VARIABLE globs)
    file(GLOB_RECURSE files RELATIVE ${ROOT} ${globs})
    list(FILTER files EXCLUDE REGEX "^build/")
  endif()
  set(present)
  foreach(file IN LISTS files)
    if(EXISTS ${ROOT}/${file})  # not one deleted in the work tree alone
      list(APPEND present ${file})
    endif()
  endforeach()
  set(${out} ${present} PARENT_SCOPE)
endfunction()
