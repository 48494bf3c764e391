/* The row sums of the disk cache's checksum (runtime/kvcache/disk/checksum.py), at the speed of memory. */
#include <string.h>

#include "infer_cpu.h"

void infer_row_sums(const void *data, int64_t rows, int64_t words, const uint64_t *a, const uint64_t *b, uint64_t *sums) {
  for (int64_t r = 0; r < rows; r++) {
    const char *row = (const char *)data + r * words * 8;
    uint64_t s = 0, t = 0;
    for (int64_t i = 0; i < words; i++) {
      uint64_t w;
      memcpy(&w, row + 8 * i, 8);
      s += a[i] * w;
      t += b[i] * (w >> 32);
    }
    sums[2 * r] = s, sums[2 * r + 1] = t;
  }
}
