// Whether this library may be used here at all: asked before anything else of it is called.

namespace {

bool cpu_has_what_this_library_uses() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#if defined(__AVX512VNNI__)
  if (!__builtin_cpu_supports("avx512vnni")) return false;
#endif
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return false;
  }
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
#endif
#endif
  return true;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int sparseserve_can_run() { return cpu_has_what_this_library_uses(); }
