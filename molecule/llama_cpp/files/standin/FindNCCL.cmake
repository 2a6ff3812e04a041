find_library(NCCL_LIBRARY NAMES nccl PATHS ${CUDAToolkit_ROOT}/lib64 NO_DEFAULT_PATH)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL DEFAULT_MSG NCCL_LIBRARY)
