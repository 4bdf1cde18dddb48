// Checks of caches: their configuration, their buffer, and what calls do with them.
#pragma once

#include "../objects/cache.h"
#include "report.h"

namespace mha {

// Reads a configuration and makes the header of a cache of it, with all defaults resolved.
mha_status make_header(Report report, const mha_kv_cache_config *given, mha_kv_cache *header);

mha_status check_buffer(Report report, const void *buffer);

// Lengths and tables of a buffer whose header is sound: they have to lie within its bounds, and
// each block in as many tables as its count says, for a block that is counted once is written to.
mha_status check_contents(Report report, const mha_kv_cache *cache);

// The first two parameters of functions for one sequence.
mha_status check_place(Report report, const mha_kv_cache *cache, int64_t sequence);

mha_status check_paged(Report report, const mha_kv_cache *cache);

// That `length` is at most the sequence's.
mha_status check_length(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t length);

// New rows come with values, unless the cache (which may be null) has them in its keys. name: of v,
// for the message.
mha_status check_values(Report report, const mha_kv_cache *cache, int64_t rows, const void *v,
                        const char *name = "v");

// Whether `count` more positions of a sequence can be written: there is room for them, in blocks
// that no other sequence shares.
mha_status check_append(Report report, const mha_kv_cache *cache, int64_t sequence, int64_t count);

// That it is a cache: what tells one from other memory, not all that mha_kv_cache_view checks.
mha_status check_cache(Report report, const mha_kv_cache *cache, const char *name = "cache");
inline mha_status check_optional_cache(Report report, const mha_kv_cache *cache,
                                       const char *name = "cache") {
  return cache ? check_cache(report, cache, name) : MHA_OK;
}
mha_status check_cache_sequence(Report report, const mha_kv_cache *cache, int64_t sequence);

// Of the caches of a call, the one to append to and the one to read, at most one is given.
inline mha_status check_one_cache(Report report, const mha_kv_cache *cache,
                                  const mha_kv_cache *cache_read) {
  return cache && cache_read
             ? report.invalid("cache and cache_read are both given; set one of them to NULL")
             : MHA_OK;
}

}  // namespace mha
