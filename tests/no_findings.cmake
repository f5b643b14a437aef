# Fails when FINDINGS is not empty, and shows it.
cmake_minimum_required(VERSION 3.25)
if(FINDINGS)
  message(FATAL_ERROR "${FINDINGS}")
endif()
