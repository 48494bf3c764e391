/* Packs matrices straight from their files. Calls share the work: each claims a run of rows, reads it into memory that
 * stays in its cache and packs it from there, so that neither the interpreter nor a second copy is in the way. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "infer_cpu.h"

namespace {

const int64_t RUN_BYTES = 256 << 10; /* stored bytes of a run of rows */

int32_t rows_of_run(const infer_stored *m) {
  int64_t rows = RUN_BYTES / m->row_bytes / INFER_STRIP * INFER_STRIP;
  return rows < INFER_STRIP ? INFER_STRIP : rows < m->w->n ? (int32_t)rows : m->w->n;
}

int32_t runs_of(const infer_stored *m) {
  int32_t rows = rows_of_run(m);
  return (int32_t)(((int64_t)m->w->n + rows - 1) / rows);
}

/* The next run: its matrix in the upper half, its number in the lower one; false when there is none or a stop is asked. */
bool claim(infer_packing *all, int64_t *claimed) {
  *claimed = __atomic_load_n(&all->next, __ATOMIC_RELAXED);
  for (;;) {
    int64_t matrix = *claimed >> 32, run = *claimed & 0xFFFFFFFF;
    if (matrix >= all->count || __atomic_load_n(&all->stop, __ATOMIC_RELAXED)) return false;
    int64_t next = run + 1 < runs_of(all->matrices + matrix) ? *claimed + 1 : (matrix + 1) << 32;
    if (__atomic_compare_exchange_n(&all->next, claimed, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
  }
}

bool read_whole(int32_t file, char *to, int64_t bytes, int64_t offset) {
  while (bytes) {
    ssize_t got = pread(file, to, (size_t)bytes, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got, offset += got, bytes -= got;
  }
  return true;
}

}  // namespace

void infer_pack_files(infer_packing *all) {
  char *buffer = NULL;
  int64_t held = 0;
  for (int64_t claimed; claim(all, &claimed);) {
    infer_stored *m = all->matrices + (claimed >> 32);
    int32_t per_run = rows_of_run(m), row0 = (int32_t)(claimed & 0xFFFFFFFF) * per_run;
    int32_t rows = m->w->n - row0 < per_run ? m->w->n - row0 : per_run;
    int64_t bytes = rows * m->row_bytes;
    if (bytes > held) {
      free(buffer);
      buffer = (char *)malloc((size_t)bytes);
      held = buffer ? bytes : 0;
    }
    bool packed = buffer && read_whole(m->file, buffer, bytes, m->offset + row0 * m->row_bytes) &&
                  infer_pack(NULL, m->type, buffer, m->w, row0, rows, m->grid) == 0;
    if (!packed) __atomic_store_n(&m->failed, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&all->done, bytes, __ATOMIC_RELAXED);
  }
  free(buffer);
}
