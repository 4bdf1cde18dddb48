// Checks of KV caches: their configuration, their buffer, and what a call reads or appends.
//
// Two different questions are asked of a buffer. mha_kv_cache_view trusts nothing, because the
// buffer may come from a file: it checks the header and then check_contents. All other functions
// get a cache that was initialised or viewed, and check_cache only finds mistakes, such as a
// pointer to something else.
#pragma once

#include "../base/report.h"
#include "../objects/cache.h"

namespace mha {

// Checks a configuration and makes the header of its cache, with all defaults resolved.
mha_status make_header(Report report, const mha_kv_cache_config *given, mha_kv_cache *header);

// Checks the memory of a pool and puts it into the header.
mha_status check_pool(Report report, const mha_kv_pool *given, mha_kv_cache *header);

// The lengths and tables of a buffer whose header is sound. They have to lie within its bounds, and
// each block has to be in as many tables as its count says, because a block that is counted once is
// written to.
mha_status check_contents(Report report, const mha_kv_cache *cache);

// The first two parameters of the functions for one sequence.
mha_status check_place(Report report, const mha_kv_cache *cache, int64_t sequence);

mha_status check_paged(Report report, const mha_kv_cache *cache);

// A length is at most that of the sequence.
mha_status check_length(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t length);

// New keys come with values, unless the cache has the values in its keys. The cache may be null,
// and `name` is that of v, for the message.
mha_status check_values(Report report, const mha_kv_cache *cache, int64_t rows, const void *v,
                        const char *name = "v");

// Whether `count` more positions of a sequence can be written: there is room for them, in blocks
// that no other sequence shares.
mha_status check_append(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t count);

// The pointer refers to a cache and not to other memory.
mha_status check_cache(Report report, const mha_kv_cache *cache, const char *name = "cache");
inline mha_status check_optional_cache(Report report, const mha_kv_cache *cache,
                                       const char *name = "cache") {
  return cache ? check_cache(report, cache, name) : MHA_OK;
}
mha_status check_cache_sequence(Report report, const mha_kv_cache *cache, int64_t sequence);

// A call either appends to a cache and reads it, or reads one without appending.
inline mha_status check_one_cache(Report report, const mha_kv_cache *cache,
                                  const mha_kv_cache *cache_read) {
  return cache && cache_read
             ? report.invalid("cache and cache_read are both given; set one of them to NULL")
             : MHA_OK;
}

}  // namespace mha
