/* Where a head's part of a block lies in the arrays of infer_kv. Included into unnamed namespaces. */
#ifndef INFER_KV_LAYOUT_H
#define INFER_KV_LAYOUT_H
#include "infer_cpu.h"

namespace {

/* `each`: elements of one head in one block. */
template <class T> inline T *kv_at(const infer_kv *kv, void *array, int64_t block, int64_t head, int64_t each) {
  int64_t stride = kv->stride ? kv->stride : kv->kv_heads * each * (int64_t)sizeof(T);
  return (T *)((char *)array + block * stride) + head * each;
}

}  // namespace
#endif
