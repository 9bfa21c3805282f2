# Fails where the core has changed since it was built: what is linked to the objects of that build
# would test old code, or with another layout of a class in its headers.
#   cmake -DBUILT=<its build folder> -P fresh.cmake
# setup.py leaves there a file `built`, which is as old as the beginning of the build.
set(CORE ${CMAKE_CURRENT_LIST_DIR})
set(sources ${CORE}/CMakeLists.txt)
foreach(folder base transport collective membership scheduler runtime)
  file(GLOB found ${CORE}/${folder}/*.cc ${CORE}/${folder}/*.h)
  list(APPEND sources ${found})
endforeach()
foreach(source ${sources})
  if(NOT EXISTS ${BUILT}/built)
    message(FATAL_ERROR "${BUILT} is not a complete build of the core; run this first: make setup")
  elseif(${source} IS_NEWER_THAN ${BUILT}/built)
    message(FATAL_ERROR "${source} is newer than the core in ${BUILT}; run this first: make setup")
  endif()
endforeach()
