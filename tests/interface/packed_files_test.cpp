// Packed layers and caches that releases wrote: each line of packed_files.txt has the version, its
// MHA_CONTRACT, layer or cache, a name, a checksum of results, and the bytes. Lines of a release
// are never changed. Before a release, this adds its lines:
//
//     build/bin/mha_test_packed_files --write
#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/fixtures.h"
#include "support/instruction_sets.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr int64_t kWidth = 20, kHeads = 2, kHeadDim = 8, kRows = 5;

const std::string kVersion = std::to_string(MHA_VERSION_MAJOR) + "." +
                             std::to_string(MHA_VERSION_MINOR) + "." +
                             std::to_string(MHA_VERSION_PATCH);

std::vector<float> Numbers(int64_t count, int first) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); i++)
    x[i] = static_cast<float>((static_cast<int>(i) * 7 + first) % 23 - 11) / 13;
  return x;
}

// FNV-1a, 64 bits, as 16 digits.
std::string Sum(const std::vector<float> &x) {
  uint64_t sum = 14695981039346656037u;
  const auto *bytes = reinterpret_cast<const unsigned char *>(x.data());
  for (size_t i = 0; i < x.size() * sizeof(float); i++) sum = (sum ^ bytes[i]) * 1099511628211u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum));
  return digits;
}

// The layer whose packed bytes are in the file, and a causal call of it.
LayerProblem Problem() {
  LayerProblem problem;
  problem.n_q = problem.n_kv = kRows;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = kWidth;
  problem.num_heads = kHeads;
  problem.head_dim = problem.head_dim_v = kHeadDim;
  problem.is_causal = true;
  problem.query = Numbers(kRows * kWidth, 5);
  problem.w_q = Numbers(kWidth * kHeads * kHeadDim, 1);
  problem.w_k = Numbers(kWidth * kHeadDim, 2);
  problem.w_v = Numbers(kWidth * kHeadDim, 3);
  problem.w_o = Numbers(kHeads * kHeadDim * kWidth, 4);
  problem.b_k = Numbers(kHeadDim, 6);
  problem.b_o = Numbers(kWidth, 7);
  return problem;
}

// What a packed layer gives: the sum of the call's rows, or the message. mha_layer_verify has to
// accept it too.
mha_status SumOfLayer(const Memory &bytes, uint32_t instruction_set, std::string *sum) {
  const mha_layer_options options = Options(instruction_set);
  const View view(bytes, &options);
  if (view.status != MHA_OK) return *sum = view.error.message, view.status;
  mha_error error;
  Check(mha_layer_verify(bytes.data(), bytes.size(), &error), error);
  *sum = Sum(ForwardData(view.layer, Problem()).Compute().y);
  return MHA_OK;
}

// What a cache gives: the sum of its keys and values, or the message.
mha_status SumOfCache(Memory *bytes, std::string *sum) {
  mha_error error;
  mha_kv_cache *cache;
  const mha_status status = mha_kv_cache_view(bytes->data(), bytes->size(), &cache, &error);
  if (status != MHA_OK) return *sum = error.message, status;
  std::vector<float> k(kRows * kHeadDim), v(k);
  Check(mha_kv_cache_read(cache, 0, 0, kRows, k.data(), v.data(), &error), error);
  k.insert(k.end(), v.begin(), v.end());
  *sum = Sum(k);
  return MHA_OK;
}

// ---- The file

struct Line {
  std::string version;
  int contract = 0;
  std::string kind, name, sum, hex;

  Memory Bytes() const {
    Memory bytes(hex.size() / 2, Place::kAnywhere);
    for (size_t i = 0; i < bytes.size(); i++)
      static_cast<unsigned char *>(bytes.data())[i] =
          static_cast<unsigned char>(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
    return bytes;
  }
};

std::vector<Line> Lines() {
  std::vector<Line> lines;
  std::FILE *const file = std::fopen(MHA_PACKED_FILES, "r");
  std::stringstream in;
  for (int c; file && (c = std::fgetc(file)) != EOF;) in.put(static_cast<char>(c));
  if (file) std::fclose(file);
  for (std::string text, more; std::getline(in, text);) {
    std::istringstream words(text);
    Line line;
    if (!(words >> line.version >> line.contract >> line.kind >> line.name >> line.sum >>
          line.hex) ||
        words >> more || line.hex.size() % 2 != 0 || (line.kind != "layer" && line.kind != "cache"))
      throw std::runtime_error("a line of " MHA_PACKED_FILES " is damaged: " + text.substr(0, 60));
    lines.push_back(line);
  }
  return lines;
}

void Write(const std::string &kind, const std::string &name, const Memory &bytes,
           const std::string &sum) {
  for (const Line &line : Lines()) {
    if (line.version == kVersion && line.contract == MHA_CONTRACT && line.kind == kind &&
        line.name == name)
      return;
  }
  std::FILE *const out = std::fopen(MHA_PACKED_FILES, "a");
  if (out == nullptr) throw std::runtime_error(MHA_PACKED_FILES " cannot be written");
  std::fprintf(out, "%s %d %s %s %s ", kVersion.c_str(), MHA_CONTRACT, kind.c_str(), name.c_str(),
               sum.c_str());
  for (size_t i = 0; i < bytes.size(); i++)
    std::fprintf(out, "%02x", static_cast<const unsigned char *>(bytes.data())[i]);
  const bool is_written = std::fputs("\n", out) >= 0 && std::ferror(out) == 0;
  if (std::fclose(out) != 0 || !is_written)
    throw std::runtime_error(MHA_PACKED_FILES " cannot be written");
}

void WriteLayer(const std::string &name, uint32_t type, uint32_t arithmetic, uint32_t gate) {
  LayerData layer(Problem());
  layer.config.format.type = type;
  layer.config.format.arithmetic = arithmetic;
  layer.config.gate = gate;
  layer.weights.w_g.data = gate ? layer.weights.w_q.data : nullptr;
  const Memory bytes = layer.Pack();
  std::string sum;
  if (SumOfLayer(bytes, MHA_INSTRUCTION_SET_AUTO, &sum) != MHA_OK)
    throw std::runtime_error(name + ": what was written cannot be read");
  Write("layer", name, bytes, sum);
}

void WriteCache(const std::string &name, uint32_t type, uint32_t kind) {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = 1;
  config.capacity = 16;
  config.num_kv_heads = 1;
  config.head_dim = kHeadDim;
  config.k_type = config.v_type = type;
  config.kind = kind;
  Cache cache(config, Place::kAnywhere, 0);
  cache.Append(0, {Numbers(kRows * kHeadDim, 8), Numbers(kRows * kHeadDim, 9)});
  std::string sum;
  if (SumOfCache(&cache.buffer(), &sum) != MHA_OK)
    throw std::runtime_error(name + ": what was written cannot be read");
  Write("cache", name, cache.buffer(), sum);
}

void WriteAll() {
  for (const Storage type : kWeightTypes)
    WriteLayer(NameOf(type), static_cast<uint32_t>(type), MHA_ARITHMETIC_F32, 0);
  for (const Storage type : kKeyTypes)
    WriteCache(NameOf(type), static_cast<uint32_t>(type), MHA_CACHE_KIND_CONTIGUOUS);
  WriteLayer("int8,arithmetic=int8", MHA_TYPE_INT8, MHA_ARITHMETIC_INT8, 0);
  WriteLayer("int4,arithmetic=int16", MHA_TYPE_INT4, MHA_ARITHMETIC_INT16, 0);
  WriteLayer("bf16,arithmetic=bf16", MHA_TYPE_BF16, MHA_ARITHMETIC_BF16, 0);
  WriteLayer("int8,gate=sigmoid", MHA_TYPE_INT8, MHA_ARITHMETIC_F32, MHA_FUNCTION_SIGMOID);
  WriteCache("f32,ring", MHA_TYPE_F32, MHA_CACHE_KIND_RING);
}

// ---- The tests

class PackedFiles : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_ALL_INSTRUCTION_SETS(PackedFiles);

TEST_P(PackedFiles, FilesOfEarlierReleasesGiveTheSameBits) {
  std::map<std::string, std::set<std::string>> types;  // by version
  for (const Line &line : Lines()) {
    SCOPED_TRACE(line.version + " " + line.kind + " " + line.name);
    types[line.version].insert(line.kind + " " + line.name.substr(0, line.name.find(',')));
    Memory bytes = line.Bytes();
    const bool is_layer = line.kind == "layer";
    std::string sum;
    const mha_status status =
        is_layer ? SumOfLayer(bytes, instruction_set(), &sum) : SumOfCache(&bytes, &sum);
    if (line.contract == MHA_CONTRACT) {
      EXPECT_EQ(status, MHA_OK);
      EXPECT_EQ(sum, line.sum);
    } else {
      EXPECT_EQ(status, is_layer ? MHA_ERROR_PACKED_FORMAT : MHA_ERROR_CACHE_FORMAT);
      EXPECT_EQ(sum, std::string(is_layer ? "the packed layer" : "the KV cache") +
                         (line.contract == 1
                              ? " has version 1 of the format, but this library reads version 2; "
                              : " has arithmetic contract 2, but this library has 3; ") +
                         (is_layer ? "pack it again" : "fill a new one"));
    }
  }
  EXPECT_FALSE(types.empty());
  for (const auto &[version, found] : types)
    EXPECT_EQ(found.size(), 9u) << version << ": layers of 5 types, caches of 4";
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 2 && std::strcmp(argv[1], "--write") == 0) return WriteAll(), 0;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
