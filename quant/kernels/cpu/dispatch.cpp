/* Which instruction sets this processor and its operating system offer, and the one in use. */
#include "kernels.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

namespace {

#if defined(__x86_64__)

struct cpu_features {
  bool avx2, avxvnni, avx512vnni, amx;
};

bool bit(uint32_t value, int index) { return value >> index & 1; }

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

/* Linux grants tile registers on request, for the whole process; their state is 8 KiB more per signal frame. */
bool request_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  const long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

cpu_features detect() {
  cpu_features found = {};
  uint32_t a, b, c, d, b7, c7, d7;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return found; /* OSXSAVE */
  bool fma = bit(c, 12), f16c = bit(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return found;
  uint64_t states = enabled_states();
  bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xE6) == 0xE6, tiles = (states & 0x60000) == 0x60000;
  found.avx2 = ymm && fma && f16c && bit(b7, 5);
  found.avx512vnni = found.avx2 && zmm && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31) && bit(c7, 11);
  found.amx = found.avx512vnni && tiles && bit(d7, 24) && bit(d7, 25) && request_tiles();
  uint32_t a1;
  found.avxvnni = found.avx2 && a >= 1 && __get_cpuid_count(7, 1, &a1, &b, &c, &d) && bit(a1, 4);
  return found;
}

const infer_kernels AMX = {"avx512vnni+amx", &infer_matmul_amx, &infer_ops_avx512};
const infer_kernels AVX512 = {"avx512vnni", &infer_matmul_avx512vnni, &infer_ops_avx512};
const infer_kernels AVXVNNI = {"avxvnni", &infer_matmul_avxvnni, &infer_ops_avx2};
const infer_kernels AVX2 = {"avx2", &infer_matmul_avx2, &infer_ops_avx2};

#elif defined(__aarch64__)

bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;
#else
  return true; /* every 64-bit processor of Apple's computers */
#endif
}

const infer_kernels NEON = {"neon", &infer_matmul_neon, &infer_ops_neon};

#endif

const infer_kernels SCALAR = {"scalar", &infer_matmul_scalar, &infer_ops_scalar};

/* The best offered, or the one of that name; NULL when it is not offered. */
const infer_kernels *find(const char *name) {
  const infer_kernels *offered[8];
  int count = 0;
#if defined(__x86_64__)
  cpu_features found = detect();
  if (found.amx) offered[count++] = &AMX;
  if (found.avx512vnni) offered[count++] = &AVX512;
  if (found.avxvnni) offered[count++] = &AVXVNNI;
  if (found.avx2) offered[count++] = &AVX2;
#elif defined(__aarch64__)
  if (has_dot_product()) offered[count++] = &NEON;
#endif
  offered[count++] = &SCALAR;
  for (int i = 0; i < count; i++)
    if (!name || !strcmp(name, offered[i]->isa)) return offered[i];
  return NULL;
}

const infer_kernels *active;

}  // namespace

const infer_kernels *infer_active(void) {
  const infer_kernels *kernels = __atomic_load_n(&active, __ATOMIC_ACQUIRE);
  if (!kernels) {
    kernels = find(NULL);
    __atomic_store_n(&active, kernels, __ATOMIC_RELEASE);
  }
  return kernels;
}

int32_t infer_abi(void) { return INFER_ABI; }

const char *infer_isa(void) { return infer_active()->isa; }

int32_t infer_set_isa(const char *name) {
  const infer_kernels *kernels = find(name);
  if (!kernels) return -1;
  __atomic_store_n(&active, kernels, __ATOMIC_RELEASE);
  return 0;
}

int64_t infer_sizeof(const char *type) {
  if (!strcmp(type, "infer_weight")) return sizeof(infer_weight);
  if (!strcmp(type, "infer_acts")) return sizeof(infer_acts);
  if (!strcmp(type, "infer_kv")) return sizeof(infer_kv);
  if (!strcmp(type, "infer_batch")) return sizeof(infer_batch);
  if (!strcmp(type, "infer_stored")) return sizeof(infer_stored);
  if (!strcmp(type, "infer_packing")) return sizeof(infer_packing);
  if (!strcmp(type, "op_embed")) return sizeof(op_embed);
  if (!strcmp(type, "op_norm")) return sizeof(op_norm);
  if (!strcmp(type, "op_quantize")) return sizeof(op_quantize);
  if (!strcmp(type, "op_matmul")) return sizeof(op_matmul);
  if (!strcmp(type, "op_rope_store")) return sizeof(op_rope_store);
  if (!strcmp(type, "op_attention")) return sizeof(op_attention);
  if (!strcmp(type, "op_glu")) return sizeof(op_glu);
  if (!strcmp(type, "op_add")) return sizeof(op_add);
  if (!strcmp(type, "op_gather")) return sizeof(op_gather);
  if (!strcmp(type, "op_route")) return sizeof(op_route);
  if (!strcmp(type, "op_experts")) return sizeof(op_experts);
  if (!strcmp(type, "op_heads")) return sizeof(op_heads);
  return -1;
}
