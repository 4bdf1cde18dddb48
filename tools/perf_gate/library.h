// A libmha.so of any version, through the functions of mha.h alone.
#pragma once

#include <string>

#include "mha.h"
#include "structs.h"

namespace gate {

struct Library {
  std::string name;  // for people: a revision, or the path
  const Structs *structs;
  decltype(&::mha_version) version;
  decltype(&::mha_instruction_sets) instruction_sets;
  decltype(&::mha_layer_pack_size) layer_pack_size;
  decltype(&::mha_layer_pack) layer_pack;
  decltype(&::mha_layer_view_size) layer_view_size;
  decltype(&::mha_layer_view) layer_view;
  decltype(&::mha_forward_workspace) forward_workspace;
  decltype(&::mha_forward) forward;
  decltype(&::mha_attention_workspace) attention_workspace;
  decltype(&::mha_attention) attention;
  // Versions before the KV cache have none of these: then all are null.
  decltype(&::mha_kv_cache_size) kv_cache_size;
  decltype(&::mha_kv_cache_init) kv_cache_init;
  decltype(&::mha_kv_cache_view) kv_cache_view;
  decltype(&::mha_kv_cache_append) kv_cache_append;
  decltype(&::mha_kv_cache_truncate) kv_cache_truncate;

  bool has_caches() const { return kv_cache_size; }
};

// Loads a library under a name of its own, so that several of them, or one several times, share nothing. Stays loaded.
Library load_library(const std::string &path, const std::string &name, const Structs &structs);

// Throws CannotMeasure unless both were really loaded, one apart from the other, and have the interface that this program was compiled for.
void check_comparable(const Library &base, const Library &candidate);

}  // namespace gate
