// The backend for llama.cpp, loaded as llama.cpp loads it, by a program with a stub of ggml, and
// compared with attention in double precision.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "ggml_stub.h"
#include "support/call.h"
#include "support/random.h"

// Those of the module, too.
thread_local int allocations_left = INT_MAX;
[[gnu::noinline]] void *operator new(size_t bytes) {
  void *const memory = allocations_left-- > 0 ? std::malloc(bytes) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
  return std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void *memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace {

using support::Random;

std::string logged, noticed;

void Log(ggml_log_level level, const char *text, void *) {
  (level == GGML_LOG_LEVEL_ERROR ? logged : noticed) += text;
}

ggml_backend_reg_t Register() {
  ggml_log_set(Log, nullptr);
  return ggml_backend_load(MHA_GGML_MODULE);
}

ggml_backend_dev_t Device(size_t index = 0) {
  const ggml_backend_reg_t registry = Register();
  if (!registry) std::fprintf(stderr, "%s\n", logged.c_str()), std::abort();
  EXPECT_EQ(registry->api_version, GGML_BACKEND_API_VERSION);
  EXPECT_EQ(registry->iface.get_device_count(registry), 2u);
  return registry->iface.get_device(registry, index);
}

// What a context of llama.cpp has.
struct Backend {
  explicit Backend(int threads, size_t index = 0)
      : device(Device(index)), it(device->iface.init_backend(device, nullptr)) {
    const ggml_backend_reg_t registry = device->reg;
    reinterpret_cast<void (*)(ggml_backend_t, int)>(
        registry->iface.get_proc_address(registry, "ggml_backend_set_n_threads"))(it, threads);
  }
  ~Backend() { it->iface.free(it); }
  Backend(const Backend &) = delete;

  ggml_status Compute(ggml_tensor *op) {
    ggml_tensor other = {};
    ggml_cgraph graph{{&other, op}};
    return it->iface.graph_compute(it, &graph);
  }

  ggml_backend_dev_t device;
  ggml_backend_t it;
};

// ---- An operation

// A tensor, [streams, heads, rows, width], and its numbers. They are n/64, which every type holds.
struct Tensor {
  ggml_tensor ggml = {};
  std::vector<float> numbers;
  std::vector<char> bytes;

  // by_rows: the heads of a row lie beside each other, as in a cache.
  Tensor(ggml_type type, int64_t width, int64_t rows, int64_t heads, int64_t streams, bool by_rows,
         Random *random)
      : numbers(width * rows * heads * streams) {
    const ggml_type_traits &traits = *ggml_get_type_traits(type);
    const size_t bytes_of_row = traits.type_size * width / traits.blck_size;
    ggml.type = type;
    const int64_t ne[] = {width, rows, heads, streams};
    const size_t nb[] = {traits.type_size, bytes_of_row * (by_rows ? heads : 1),
                         bytes_of_row * (by_rows ? 1 : rows), bytes_of_row * rows * heads};
    std::copy_n(ne, 4, ggml.ne), std::copy_n(nb, 4, ggml.nb);
    bytes.resize(nb[3] * streams);
    ggml.data = bytes.data();
    for (float &number : numbers) number = static_cast<float>(random->Between(-64, 64)) / 64;
    for (int64_t i = 0; i < rows * heads * streams; i++) {
      const float *const from = &numbers[i * width];
      char *const to =
          &bytes[i / (rows * heads) * nb[3] + i / rows % heads * nb[2] + i % rows * nb[1]];
      for (int64_t d = 0; d < width; d++) {
        Block &block = reinterpret_cast<Block *>(to)[d / 32];
        if (type == GGML_TYPE_F32) {
          std::memcpy(to + 4 * d, from + d, 4);
        } else if (type == GGML_TYPE_Q8_0) {
          block.factor = Block().factor, block.codes[d % 32] = static_cast<int8_t>(from[d] * 64);
        } else {
          const uint16_t bits = support::BitsIn16(
              type == GGML_TYPE_F16 ? support::Storage::kF16 : support::Storage::kBf16, from[d]);
          std::memcpy(to + 2 * d, &bits, 2);
        }
      }
    }
  }

  const float *row(int64_t stream, int64_t head, int64_t row) const {
    return &numbers[(((stream * ggml.ne[2]) + head) * ggml.ne[1] + row) * ggml.ne[0]];
  }
};

enum class Mask { kNone, kCausal, kNumbers, kOfHeads };

struct Shape {
  ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_F16;
  int64_t width = 64, width_v = 64, n_q = 7, n_kv = 40, heads = 4, kv_heads = 2, streams = 1;
  Mask mask = Mask::kCausal;
  bool has_sinks = false, by_rows = true;
  float softcap = 0, scale = 0.125f;
};

struct Operation {
  Shape shape;
  Random random{7};
  Tensor q, k, v, mask, sinks;
  std::vector<float> output;
  ggml_tensor op = {};

  explicit Operation(const Shape &s)
      : shape(s),
        q(GGML_TYPE_F32, s.width, s.n_q, s.heads, s.streams, s.by_rows, &random),
        k(s.k_type, s.width, s.n_kv, s.kv_heads, s.streams, s.by_rows, &random),
        v(s.v_type, s.width_v, s.n_kv, s.kv_heads, s.streams, s.by_rows, &random),
        mask(GGML_TYPE_F16, s.n_kv, s.n_q, s.mask == Mask::kOfHeads ? s.heads : 1, s.streams, false,
             &random),
        sinks(GGML_TYPE_F32, s.heads, 1, 1, 1, false, &random),
        output(s.width_v * s.heads * s.n_q * s.streams, NAN) {
    for (size_t i = 0; i < mask.numbers.size(); i++) {
      const int64_t key = static_cast<int64_t>(i) % s.n_kv,
                    query = static_cast<int64_t>(i) / s.n_kv % s.n_q;
      const bool is_masked = key < 3 || key > s.n_kv - 6 - s.n_q + query;
      if (is_masked || s.mask == Mask::kCausal) mask.numbers[i] = is_masked ? -INFINITY : 0;
      const uint16_t bits =
          is_masked ? 0xFC00 : support::BitsIn16(support::Storage::kF16, mask.numbers[i]);
      std::memcpy(&mask.bytes[2 * i], &bits, 2);
    }
    op.type = GGML_TYPE_F32, op.op = GGML_OP_FLASH_ATTN_EXT, op.flags = GGML_TENSOR_FLAG_COMPUTE;
    const int64_t ne[] = {s.width_v, s.heads, s.n_q, s.streams};
    for (int i = 0; i < 4; i++) {
      op.ne[i] = ne[i];
      op.nb[i] = i == 0 ? 4 : op.nb[i - 1] * ne[i - 1];
    }
    const float parameters[] = {s.scale, 0, s.softcap};
    std::memcpy(op.op_params, parameters, sizeof parameters);
    op.src[0] = &q.ggml, op.src[1] = &k.ggml, op.src[2] = &v.ggml;
    if (s.mask != Mask::kNone) op.src[3] = &mask.ggml;
    if (s.has_sinks) op.src[4] = &sinks.ggml;
    op.data = output.data();
  }

  bool IsSupported() {
    const ggml_backend_dev_t device = Device();
    return device->iface.supports_op(device, &op);
  }

  std::vector<double> Expected() const {
    const Shape &s = shape;
    std::vector<double> expected;
    for (int64_t stream = 0; stream < s.streams; stream++) {
      for (int64_t i = 0; i < s.n_q; i++) {
        for (int64_t head = 0; head < s.heads; head++) {
          double sum = s.has_sinks ? std::exp(static_cast<double>(sinks.numbers[head])) : 0;
          std::vector<double> context(s.width_v);
          const int64_t kv_head = head / (s.heads / s.kv_heads);
          for (int64_t j = 0; j < s.n_kv; j++) {
            double score = 0;
            for (int64_t d = 0; d < s.width; d++) {
              score +=
                  static_cast<double>(q.row(stream, head, i)[d]) * k.row(stream, kv_head, j)[d];
            }
            score *= s.scale;
            if (s.softcap != 0) score = s.softcap * std::tanh(score / s.softcap);
            if (s.mask != Mask::kNone)
              score += mask.row(stream, s.mask == Mask::kOfHeads ? head : 0, i)[j];
            const double weight = std::exp(score);
            sum += weight;
            for (int64_t d = 0; d < s.width_v; d++)
              context[d] += weight * v.row(stream, kv_head, j)[d];
          }
          for (const double number : context) expected.push_back(number / sum);
        }
      }
    }
    return expected;
  }
};

void ExpectExpected(const Operation &operation) {
  const std::vector<double> expected = operation.Expected();
  for (size_t i = 0; i < expected.size(); i++)
    ASSERT_NEAR(operation.output[i], expected[i], 2e-6) << "number " << i;
}

std::string Check(const Shape &shape, int threads = 1) {
  Operation operation(shape);
  if (!operation.IsSupported()) return "is declined";
  if (Backend(threads).Compute(&operation.op) != GGML_STATUS_SUCCESS) return "failed: " + logged;
  ExpectExpected(operation);
  return testing::Test::HasFatalFailure() ? "is wrong" : "";
}

Shape With(void (*change)(Shape *)) {
  Shape shape;
  change(&shape);
  return shape;
}

TEST(Ggml, TakesEveryOption) {
  EXPECT_EQ(Check({}), "");
  for (const ggml_type k : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
    for (const ggml_type v : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
      Shape shape;
      shape.k_type = k, shape.v_type = v, shape.streams = 2;
      EXPECT_EQ(Check(shape), "") << ggml_type_name(k) << ", " << ggml_type_name(v);
      shape.by_rows = false, shape.n_q = 1;
      EXPECT_EQ(Check(shape, 3), "") << ggml_type_name(k) << ", " << ggml_type_name(v);
    }
  }
  EXPECT_EQ(Check(With([](Shape *s) { s->has_sinks = true, s->softcap = 3; })), "");
  EXPECT_EQ(Check(With([](Shape *s) { s->width = 96, s->width_v = 32; })), "");
  EXPECT_EQ(Check(With([](Shape *s) { s->mask = Mask::kNone, s->n_q = 50; })), "");
  EXPECT_EQ(Check(With([](Shape *s) { s->mask = Mask::kNumbers, s->streams = 3; })), "");
  EXPECT_EQ(Check(With([](Shape *s) { s->mask = Mask::kOfHeads, s->streams = 3, s->heads = 6; })),
            "");
  EXPECT_EQ(Check(With([](Shape *s) { s->scale = 0; })), "");
  EXPECT_EQ(
      Check(With([](Shape *s) { s->n_q = 200, s->n_kv = 700, s->k_type = GGML_TYPE_Q8_0; }), 3),
      "");
}

TEST(Ggml, DeclinesWhatItDoesNotKnow) {
  const auto is_supported = [](void (*change)(Operation *)) {
    Operation operation{Shape{}};
    change(&operation);
    return operation.IsSupported();
  };
  EXPECT_TRUE(is_supported([](Operation *) {}));
  EXPECT_FALSE(is_supported([](Operation *o) { o->op.op = GGML_OP_ADD; }));
  EXPECT_FALSE(is_supported([](Operation *o) { o->op.op_params[1] = 0x3F800000; })) << "ALiBi";
  EXPECT_FALSE(is_supported([](Operation *o) { o->op.op_params[5] = 1; }))
      << "an unknown parameter";
  EXPECT_FALSE(is_supported([](Operation *o) { o->op.src[5] = &o->sinks.ggml; }))
      << "an unknown source";
  EXPECT_FALSE(is_supported([](Operation *o) { o->q.ggml.type = GGML_TYPE_F16; }));
  EXPECT_FALSE(is_supported([](Operation *o) { o->k.ggml.type = GGML_TYPE_I32; }));
  EXPECT_FALSE(is_supported([](Operation *o) { o->v.ggml.nb[0] *= 2; })) << "transposed values";
  EXPECT_FALSE(is_supported([](Operation *o) { o->k.ggml.nb[1]++; }))
      << "half a number between rows";
  EXPECT_FALSE(is_supported([](Operation *o) { o->mask.ggml.type = GGML_TYPE_F32; }));
  EXPECT_FALSE(is_supported([](Operation *o) { o->mask.ggml.ne[2] = 2; }))
      << "a mask for every other head";
  EXPECT_FALSE(is_supported([](Operation *o) { o->mask.ggml.ne[1] = 6; }))
      << "less rows than queries";
  EXPECT_FALSE(is_supported([](Operation *o) { o->v.ggml.ne[1]--; }));
  EXPECT_FALSE(is_supported([](Operation *o) { o->op.op_params[0] = 0x7F800000; }))
      << "an infinite scale";
  const ggml_backend_dev_t device = Device();
  EXPECT_TRUE(device->iface.supports_buft(device, &stub_host_memory));
  EXPECT_FALSE(device->iface.supports_buft(device, &stub_other_memory));
}

// -fa auto: see backend.cpp.
TEST(Ggml, LeavesTheFirstGraphOfAContextToTheCpu) {
  Operation operation{Shape{}};
  const ggml_backend_dev_t device = Device();
  {
    Backend backend(1);
    EXPECT_TRUE(operation.IsSupported()) << "before the scheduler is made";
    device->iface.supports_buft(device, &stub_host_memory);
    EXPECT_FALSE(operation.IsSupported());
    std::thread([&] { EXPECT_TRUE(operation.IsSupported()); }).join();
    backend.it->iface.synchronize(backend.it);
    EXPECT_TRUE(operation.IsSupported());
  }
  {
    Backend backend(1);
    device->iface.supports_buft(device, &stub_host_memory);
  }
  EXPECT_TRUE(operation.IsSupported()) << "after a context that was given up";
}

TEST(Ggml, FailsWithASentence) {
  Operation operation{Shape{}};
  std::strcpy(operation.op.name, "fattn-3");
  operation.op.op_params[0] = 0x7F800000;
  logged.clear();
  EXPECT_EQ(Backend(1).Compute(&operation.op), GGML_STATUS_FAILED);
  EXPECT_NE(logged.find("mha: FLASH_ATTN_EXT \"fattn-3\" failed: "), std::string::npos) << logged;
  EXPECT_NE(logged.find("scale"), std::string::npos) << logged;
  operation.op.flags = 0;
  EXPECT_EQ(Backend(1).Compute(&operation.op), GGML_STATUS_SUCCESS) << "not to be computed";
}

TEST(Ggml, HasTheSameBitsInContextsAtOnce) {
  Shape shape;
  shape.n_q = 64, shape.n_kv = 3000, shape.v_type = GGML_TYPE_Q8_0;
  const auto run = [&](int threads, std::vector<float> *output) {
    Operation operation(shape);
    Backend backend(threads);
    for (int times = 0; times < 2; times++) {
      EXPECT_EQ(backend.Compute(&operation.op), GGML_STATUS_SUCCESS);
    }
    *output = operation.output;
  };
  std::vector<float> alone, outputs[3];
  run(1, &alone);
  std::vector<std::thread> threads;
  for (std::vector<float> &output : outputs) threads.emplace_back(run, 3, &output);
  for (std::thread &thread : threads) thread.join();
  for (const std::vector<float> &output : outputs) {
    EXPECT_EQ(std::memcmp(output.data(), alone.data(), sizeof(float) * alone.size()), 0);
  }
}

// ---- Recurrent attention

struct RecurrentShape {
  int64_t width = 20, heads = 6, key_heads = 3, rows = 24, sequences = 2, states = 1;
  bool has_wide_decay = false, is_permuted = false;
};

struct RecurrentOperation {
  RecurrentShape shape;
  Random random{3};
  Tensor q, k, v, decay, beta, state;
  std::vector<float> output;
  ggml_tensor op = {};

  explicit RecurrentOperation(const RecurrentShape &s)
      : shape(s),
        q(GGML_TYPE_F32, s.width, s.key_heads, s.rows, s.sequences, s.is_permuted, &random),
        k(GGML_TYPE_F32, s.width, s.key_heads, s.rows, s.sequences, s.is_permuted, &random),
        v(GGML_TYPE_F32, s.width, s.heads, s.rows, s.sequences, s.is_permuted, &random),
        decay(GGML_TYPE_F32, s.has_wide_decay ? s.width : 1, s.heads, s.rows, s.sequences, false,
              &random),
        beta(GGML_TYPE_F32, 1, s.heads, s.rows, s.sequences, false, &random),
        state(GGML_TYPE_F32, s.width, s.width, s.heads, s.sequences, false, &random),
        output(s.width * s.heads * s.sequences * (s.rows + s.width * s.states) + 1, NAN) {
    const auto change = [](Tensor *tensor, auto to) {
      float *const floats = reinterpret_cast<float *>(tensor->bytes.data());
      for (size_t i = 0; i < tensor->numbers.size(); i++) {
        tensor->numbers[i] = to(tensor->numbers[i]), floats[i] = to(floats[i]);
      }
    };
    change(&k, [](float x) { return x / 4; });
    change(&decay, [](float x) { return x - 0.9f; });
    change(&beta, [](float x) { return std::abs(x); });
    op.type = GGML_TYPE_F32, op.op = GGML_OP_GATED_DELTA_NET, op.flags = GGML_TENSOR_FLAG_COMPUTE;
    op.op_params[0] = static_cast<int32_t>(s.states);
    Tensor *const sources[] = {&q, &k, &v, &decay, &beta, &state};
    for (int i = 0; i < 6; i++) op.src[i] = &sources[i]->ggml;
    op.data = output.data();
  }

  bool IsSupported() {
    const ggml_backend_dev_t device = Device();
    void *data[6];  // which is allocated later
    for (int i = 0; i < 6; i++) data[i] = std::exchange(op.src[i]->data, nullptr);
    const bool is_supported = device->iface.supports_op(device, &op);
    for (int i = 0; i < 6; i++) op.src[i]->data = data[i];
    return is_supported;
  }

  std::vector<double> Expected() const {
    const RecurrentShape &s = shape;
    const int64_t outputs = s.width * s.heads * s.sequences * s.rows;
    std::vector<double> expected(output.size() - 1);
    for (int64_t of = 0; of < s.sequences * s.heads; of++) {
      const int64_t sequence = of / s.heads, head = of % s.heads, key_head = head % s.key_heads;
      for (int64_t j = 0; j < s.width; j++) {  // columns do not depend on each other
        const float *const given = state.row(sequence, head, j);
        std::vector<double> column(given, given + s.width);
        for (int64_t t = 0; t < s.rows; t++) {
          const float *const decays = decay.row(sequence, t, head);
          const float *const keys = k.row(sequence, t, key_head);
          const float *const queries = q.row(sequence, t, key_head);
          double of_key = 0, of_query = 0;
          for (int64_t i = 0; i < s.width; i++) {
            column[i] *= std::exp(static_cast<double>(decays[s.has_wide_decay ? i : 0]));
            of_key += keys[i] * column[i];
          }
          const double change =
              beta.row(sequence, t, head)[0] * (v.row(sequence, t, head)[j] - of_key);
          for (int64_t i = 0; i < s.width; i++) {
            column[i] += keys[i] * change;
            of_query += queries[i] * column[i];
          }
          expected[((sequence * s.rows + t) * s.heads + head) * s.width + j] =
              of_query / std::sqrt(static_cast<double>(s.width));
          const int64_t left = s.rows - 1 - t;
          if (left >= s.states) continue;
          std::copy(
              column.begin(), column.end(),
              &expected[outputs + ((left * s.sequences * s.heads + of) * s.width + j) * s.width]);
        }
      }
    }
    return expected;
  }
};

TEST(Ggml, TakesRecurrentAttention) {
  const auto check = [](void (*change)(RecurrentShape *), int threads = 1) {
    RecurrentShape shape;
    change(&shape);
    RecurrentOperation operation(shape);
    if (shape.key_heads == 1) operation.k.ggml.nb[1] = 4;  // which means nothing
    ASSERT_TRUE(operation.IsSupported());
    ASSERT_EQ(Backend(threads).Compute(&operation.op), GGML_STATUS_SUCCESS) << logged;
    const std::vector<double> expected = operation.Expected();
    for (size_t i = 0; i < expected.size(); i++)
      ASSERT_NEAR(operation.output[i], expected[i], 2e-6) << "number " << i;
    EXPECT_TRUE(std::isnan(operation.output.back()));
  };
  check([](RecurrentShape *) {});
  check([](RecurrentShape *s) { s->has_wide_decay = s->is_permuted = true; }, 3);
  check([](RecurrentShape *s) { s->states = 3; }, 3);
  check([](RecurrentShape *s) { s->key_heads = 1, s->sequences = 1, s->width = 128; });
  check([](RecurrentShape *s) { s->key_heads = 6, s->width = 16, s->is_permuted = true; });
}

TEST(Ggml, DeclinesRecurrentAttentionThatItDoesNotKnow) {
  const auto is_supported = [](void (*change)(RecurrentOperation *), int64_t rows = 24,
                               int64_t states = 3) {
    RecurrentShape shape;
    shape.rows = rows, shape.states = states;
    RecurrentOperation operation(shape);
    change(&operation);
    return operation.IsSupported();
  };
  const auto as_it_is = [](RecurrentOperation *) {};
  EXPECT_TRUE(is_supported(as_it_is));
  EXPECT_TRUE(is_supported(as_it_is, 8, 1));
  EXPECT_FALSE(is_supported(as_it_is, 7, 1)) << "few rows";
  EXPECT_FALSE(is_supported(as_it_is, 23, 3)) << "few rows, of which three states are wanted";
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->op.op_params[0] = 0; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->op.op_params[1] = 1; }))
      << "an unknown parameter";
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->op.src[6] = &o->q.ggml; }))
      << "an unknown source";
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->k.ggml.type = GGML_TYPE_F16; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->v.ggml.nb[0] *= 2; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->v.ggml.nb[2]++; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->q.ggml.ne[3] = 1; }))
      << "queries of one sequence for two";
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->decay.ggml.ne[0] = 2; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->beta.ggml.nb[2] *= 2; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->state.ggml.ne[0]--; }));
  EXPECT_FALSE(is_supported([](RecurrentOperation *o) { o->q.ggml.ne[1] = o->k.ggml.ne[1] = 4; }))
      << "4 heads for 6";
}

// ---- Weights

ggml_tensor Weights(ggml_type type, int64_t inputs, int64_t outputs, int64_t experts = 1) {
  const ggml_type_traits &traits = *ggml_get_type_traits(type);
  ggml_tensor w = {};
  w.type = type, w.ne[0] = inputs, w.ne[1] = outputs, w.ne[2] = experts, w.ne[3] = 1;
  w.nb[0] = traits.type_size, w.nb[1] = traits.type_size * inputs / traits.blck_size;
  w.nb[2] = w.nb[1] * outputs, w.nb[3] = w.nb[2] * experts;
  return w;
}

// A buffer of the module that holds this tensor.
ggml_backend_buffer_t Put(ggml_tensor *w) {
  const ggml_backend_dev_t device = Device(1);
  const ggml_backend_buffer_type_t type = device->iface.get_buffer_type(device);
  const ggml_backend_buffer_t buffer =
      ggml_backend_buft_alloc_buffer(type, type->iface.get_alloc_size(type, w));
  ggml_backend_tensor_alloc(buffer, w, buffer->iface.get_base(buffer));
  return buffer;
}

std::vector<uint8_t> Read(const ggml_tensor &t, size_t offset, size_t bytes) {
  std::vector<uint8_t> read(bytes);
  ggml_backend_tensor_get(&t, read.data(), offset, bytes);
  return read;
}

std::vector<uint8_t> RandomBytes(size_t count) {
  Random random{5};
  std::vector<uint8_t> bytes(count);
  for (uint8_t &byte : bytes) byte = static_cast<uint8_t>(random.Below(256));
  return bytes;
}

constexpr ggml_type kPacked[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                                 GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};

bool HasOffsets(ggml_type type) {
  return type != GGML_TYPE_Q4_0 && type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q8_0 &&
         type != GGML_TYPE_Q6_K;
}

// Where the halves of a block are: its scale, and its minimum or the factor of minima.
size_t HalvesOf(ggml_type type) { return type == GGML_TYPE_Q6_K ? 208 : 0; }

// Weight i of a block, as ggml reads it.
double WeightOf(ggml_type type, const uint8_t *block, const float (&halves)[2], int i) {
  const uint8_t *const after = block + (HasOffsets(type) ? 4 : 2);
  const int of_half = i % 32 < 16 ? 0 : 4;
  const auto bit = [](const uint8_t *from, int at) { return from[at / 8] >> at % 8 & 1; };
  switch (type) {
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q4_1: {
      const int code = after[i % 16] >> of_half & 15;
      return halves[0] * (type == GGML_TYPE_Q4_0 ? code - 8 : code) + halves[1];
    }
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q5_1: {
      const int code = (after[4 + i % 16] >> of_half & 15) + 16 * bit(after, i);
      return halves[0] * (type == GGML_TYPE_Q5_0 ? code - 16 : code) + halves[1];
    }
    case GGML_TYPE_Q8_0:
      return halves[0] * static_cast<int8_t>(after[i]);
    case GGML_TYPE_Q6_K: {
      const int part = i / 32 % 4, low = block[i / 128 * 64 + i % 64] >> part / 2 * 4 & 15,
                high = block[128 + i / 128 * 32 + i % 32] >> 2 * part & 3;
      return halves[0] * static_cast<int8_t>(block[192 + i / 16]) * (low + 16 * high - 32);
    }
    default: {  // Q4_K, Q5_K
      const bool is_5 = type == GGML_TYPE_Q5_K;
      const int g = i / 32, low = block[(is_5 ? 48 : 16) + i / 64 * 32 + i % 32] >> g % 2 * 4 & 15,
                code = low + (is_5 ? 16 * (block[16 + i % 32] >> g & 1) : 0);
      const uint8_t *const six = block + 4;
      const int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4,
                minimum = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
      return halves[0] * scale * code - halves[1] * minimum;
    }
  }
}

void CheckPackedWeights(ggml_type weight_type) {
  const ggml_type_traits &traits = *ggml_get_type_traits(weight_type);
  const int64_t kInputs = 3 * traits.blck_size;
  constexpr int64_t kOutputs = 40;
  const size_t block_bytes = traits.type_size;
  Random random{5};
  std::vector<uint8_t> blocks = RandomBytes(3 * kOutputs * block_bytes);
  std::vector<double> weights;
  for (size_t at = 0; at < blocks.size(); at += block_bytes) {
    float halves[2] = {};
    for (int i = 0; i <= HasOffsets(weight_type); i++) {
      halves[i] = static_cast<float>(random.Between(-64, 64)) / 512;
      const uint16_t bits = support::BitsIn16(support::Storage::kF16, halves[i]);
      std::memcpy(&blocks[at + HalvesOf(weight_type) + 2 * i], &bits, 2);
    }
    for (int i = 0; i < traits.blck_size; i++)
      weights.push_back(WeightOf(weight_type, &blocks[at], halves, i));
  }
  ggml_tensor w = Weights(weight_type, kInputs, kOutputs);
  const ggml_backend_dev_t device = Device(1);
  const ggml_backend_buffer_type_t type = device->iface.get_buffer_type(device);
  EXPECT_TRUE(device->iface.supports_buft(device, type));
  const ggml_tensor large = Weights(weight_type, 2048, 4800);  // takes what it takes in ggml
  EXPECT_LT(type->iface.get_alloc_size(type, &large),
            1.032 * static_cast<double>(ggml_nbytes(&large)));
  const ggml_backend_buffer_t buffer = Put(&w);
  const auto set = [&](size_t bytes, int allocations = INT_MAX) {  // at the end
    allocations_left = allocations;
    const size_t offset = blocks.size() - bytes;
    ggml_backend_tensor_set(&w, &blocks[offset], offset, bytes);
    allocations_left = INT_MAX;
  };
  set(blocks.size());

  ggml_tensor op = {};
  op.op = GGML_OP_MUL_MAT, op.flags = GGML_TENSOR_FLAG_COMPUTE, op.src[0] = &w;
  std::vector<float> output;
  const auto check = [&](const Tensor &x, double bound = 1e-2) {
    const int64_t *const ne = x.ggml.ne;
    op.src[1] = const_cast<ggml_tensor *>(&x.ggml);
    output.assign(kOutputs * ne[1] * ne[2] * ne[3] + 1, NAN);
    op.data = output.data();
    EXPECT_TRUE(device->iface.supports_op(device, &op));
    EXPECT_EQ(Backend(2).Compute(&op), GGML_STATUS_SUCCESS) << logged;
    std::vector<double> expected(output.size() - 1);
    double largest = 0;
    for (size_t i = 0; i < expected.size(); i++) {
      const float *const row = &x.numbers[i / kOutputs * kInputs];
      for (int64_t j = 0; j < kInputs; j++) {
        expected[i] += row[j] * weights[i % kOutputs * kInputs + j];
      }
      largest = std::max(largest, std::abs(expected[i]));
    }
    for (size_t i = 0; i < expected.size(); i++) {
      ASSERT_NEAR(output[i], expected[i], bound * largest) << "number " << i;
    }
    EXPECT_TRUE(std::isnan(output.back()));
  };
  const auto check_rows = [&](std::vector<int32_t> rows) {
    ggml_tensor x = Weights(GGML_TYPE_I32, static_cast<int64_t>(rows.size()), 1), get = {};
    x.data = rows.data();
    std::vector<float> read(rows.size() * kInputs + 1, NAN), expected(kInputs);
    get = Weights(GGML_TYPE_F32, kInputs, x.ne[0]);
    get.op = GGML_OP_GET_ROWS, get.flags = GGML_TENSOR_FLAG_COMPUTE, get.data = read.data();
    get.src[0] = &w, get.src[1] = &x;
    EXPECT_TRUE(device->iface.supports_op(device, &get));
    if (Backend(2).Compute(&get) != GGML_STATUS_SUCCESS) return false;
    for (size_t i = 0; i < rows.size(); i++) {
      ggml_get_type_traits(weight_type)
          ->to_float(&blocks[rows[i] * w.nb[1]], &expected[0], kInputs);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), &read[i * kInputs])) << rows[i];
    }
    EXPECT_TRUE(std::isnan(read.back()));
    return true;
  };
  EXPECT_TRUE(check_rows({3, kOutputs - 1, 0, 3}));
  EXPECT_FALSE(check_rows({kOutputs})) << "there is no such row";
  EXPECT_FALSE(check_rows({0, -1}));
  for (const int64_t rows : {0, 1, 33}) check({GGML_TYPE_F32, kInputs, rows, 1, 1, true, &random});
  check({GGML_TYPE_F32, kInputs, 7, 3, 2, true, &random});
  Tensor apart(GGML_TYPE_F32, kInputs, 7, 3, 1, true, &random);
  apart.ggml.ne[2] = 1;  // the first of three beside each other
  check(apart);
  Tensor one(GGML_TYPE_F32, kInputs, kInputs, 1, 1, true, &random);  // each row has a single input
  for (size_t i = 0; i < one.numbers.size(); i++) one.numbers[i] = i % (kInputs + 1) == 0;
  std::memcpy(one.bytes.data(), one.numbers.data(), one.bytes.size());
  check(one, 1e-6);

  // Parts are read and written as if they lay as in ggml, also those of views.
  ggml_tensor view = Weights(weight_type, kInputs, kOutputs - 3);
  view.view_src = &w, view.view_offs = 3 * w.nb[1];
  ggml_backend_tensor_alloc(buffer, &view, static_cast<char *>(w.data) + view.view_offs);
  EXPECT_FALSE(ggml_backend_buft_is_host(view.buffer->buft)) << "where nothing would be packed";
  const std::vector<uint8_t> part(blocks.begin() + view.view_offs + 5, blocks.end());
  EXPECT_EQ(Read(view, 5, part.size()), part);
  buffer->iface.memset_tensor(buffer, &view, 0, 5, part.size());
  EXPECT_EQ(Read(w, blocks.size() - part.size(), part.size()), std::vector<uint8_t>(part.size()));
  ggml_backend_tensor_set(&view, part.data(), 5, part.size());
  EXPECT_EQ(Read(w, 0, blocks.size()), blocks);
  check(one, 1e-6);
  op.src[0] = &view;
  EXPECT_FALSE(device->iface.supports_op(device, &op)) << "its layer is that of another tensor";
  op.src[0] = &w;

  ggml_backend_buffer elsewhere = {};
  elsewhere.buft = &stub_host_memory;
  for (ggml_backend_buffer_t other : {ggml_backend_buffer_t{}, &elsewhere}) {
    w.buffer = other;
    EXPECT_FALSE(device->iface.supports_op(device, &op));
  }
  w.buffer = buffer;
  const auto expect_failure = [&] {
    logged.clear();
    EXPECT_EQ(Backend(1).Compute(&op), GGML_STATUS_FAILED);
    const char *const sentence = "mha: MUL_MAT \"\" failed: its weights are not packed";
    EXPECT_NE(logged.find(sentence), std::string::npos) << logged;
  };
  set(blocks.size(), 0);
  expect_failure();
  EXPECT_FALSE(check_rows({0})) << "which are not packed";
  EXPECT_EQ(Read(w, 0, blocks.size()), blocks) << "which lie there as in ggml";
  set(5);  // which packs the whole
  check(one, 1e-6);
  set(5, 1);
  expect_failure();
  EXPECT_EQ(Read(w, 0, blocks.size()), blocks);
  set(5);
  allocations_left = 0;
  buffer->iface.memset_tensor(buffer, &w, 1, 0, 1);
  allocations_left = INT_MAX;
  expect_failure();
  set(blocks.size());
  buffer->iface.clear(buffer, 7);
  EXPECT_EQ(Read(w, 1, 99), std::vector<uint8_t>(99, 7));
  expect_failure();
  ggml_backend_buffer_free(buffer);
}

TEST(Ggml, MultipliesByPackedWeights) {
  for (const ggml_type type : kPacked) {
    SCOPED_TRACE(ggml_type_name(type));
    CheckPackedWeights(type);
  }
}

// Every scale that is a number, so that models are saved as they were read.
TEST(Ggml, ReadsTheBytesOfPackedWeights) {
  for (const ggml_type weight_type : kPacked) {
    ggml_tensor w = Weights(weight_type, 64 * ggml_get_type_traits(weight_type)->blck_size, 1024);
    std::vector<uint8_t> blocks = RandomBytes(ggml_nbytes(&w));
    for (uint32_t i = 0; i < 65536; i++) {
      const uint16_t scale = (i & 0x7FFF) > 0x7C00 ? 0xFC00 : static_cast<uint16_t>(i);
      for (size_t at = 0; at <= HasOffsets(weight_type); at++)
        std::memcpy(&blocks[i * w.nb[0] + HalvesOf(weight_type) + 2 * at], &scale, 2);
    }
    const ggml_backend_buffer_t buffer = Put(&w);
    ggml_backend_tensor_set(&w, blocks.data(), 0, blocks.size());
    EXPECT_NE(std::memcmp(w.data, blocks.data(), blocks.size()), 0) << "is packed";
    EXPECT_TRUE(Read(w, 0, blocks.size()) == blocks) << ggml_type_name(weight_type);
    const ggml_backend_buffer_t another = Put(&w);
    another->iface.clear(another, 0);
    EXPECT_EQ(Read(w, 1, 99), std::vector<uint8_t>(99)) << "as it was in the first buffer";
    ggml_backend_buffer_free(another);
    ggml_backend_buffer_free(buffer);
  }
}

TEST(Ggml, GivesBackPagesOfAMappedFileThatItPacked) {
  ggml_tensor w = Weights(GGML_TYPE_Q8_0, 4096, 1024);
  const std::vector<uint8_t> blocks(ggml_nbytes(&w), 7);
  FILE *const file = std::tmpfile();
  ASSERT_EQ(std::fwrite(blocks.data(), 1, blocks.size(), file), blocks.size());
  std::fflush(file);
  void *const map = mmap(nullptr, blocks.size(), PROT_READ, MAP_SHARED, fileno(file), 0);
  const auto read_all = [&] { return std::memcmp(map, blocks.data(), blocks.size()) == 0; };
  const auto resident = [] {
    double pages = 0;
    std::ifstream("/proc/self/statm") >> pages >> pages;
    return pages * 4096;
  };
  const ggml_backend_buffer_t buffer = Put(&w);
  for (int times = 0; times < 3; times++)  // until malloc has the memory that it keeps
    ggml_backend_tensor_set(&w, blocks.data(), 0, blocks.size());
  EXPECT_TRUE(read_all());
  const double before = resident();
  ggml_backend_tensor_set(&w, map, 0, blocks.size());
  EXPECT_NEAR(before - resident(), blocks.size(), 1e6);
  EXPECT_TRUE(read_all());
  ggml_backend_buffer_free(buffer);
  munmap(map, blocks.size()), std::fclose(file);
}

// Every number of bf16 is read as it was written, but that factors below 2^-50 are 0; and products
// are those of the library. Without the instructions, llama.cpp's products are as good.
TEST(Ggml, MultipliesByWeightsOfBf16OnlyWhereThereAreInstructionsForIt) {
  constexpr int64_t kInputs = 512, kOutputs = 128, kRows = 5;
  ggml_tensor w = Weights(GGML_TYPE_BF16, kInputs, kOutputs), op = {};
  const ggml_backend_dev_t device = Device(1);
  const ggml_backend_buffer_t buffer = Put(&w);
  std::vector<uint16_t> numbers(kInputs * kOutputs), read(numbers.size());
  for (size_t i = 0; i < numbers.size(); i++) {
    const size_t size = i & 0x7FFF, of_2_to_minus_50 = 0x2680;
    numbers[i] = size > 0x7F80 ? 0x7FC0 : size < of_2_to_minus_50 ? 0 : static_cast<uint16_t>(i);
  }
  const size_t bytes = 2 * numbers.size();
  ggml_backend_tensor_set(&w, numbers.data(), 0, bytes);
  Random random{5};
  const Tensor x(GGML_TYPE_F32, kInputs, kRows, 1, 1, true, &random);
  op.op = GGML_OP_MUL_MAT, op.flags = GGML_TENSOR_FLAG_COMPUTE, op.src[0] = &w;
  op.src[1] = const_cast<ggml_tensor *>(&x.ggml);
  const bool is_packed = mha_instruction_sets() >> MHA_INSTRUCTION_SET_AVX512_BF16 & 3;
  EXPECT_EQ(std::memcmp(w.data, numbers.data(), bytes) != 0, is_packed);
  EXPECT_EQ(ggml_backend_buft_is_host(w.buffer->buft), !is_packed);
  EXPECT_EQ(device->iface.supports_op(device, &op), is_packed);
  if (is_packed) {
    ggml_backend_tensor_get(&w, read.data(), 0, bytes);
    EXPECT_TRUE(read == numbers);
    for (uint16_t &number : numbers) number = static_cast<uint16_t>(random.Between(0x3E00, 0x4000));
    ggml_backend_tensor_set(&w, &numbers[7], 14, bytes - 14);  // which packs the whole
    ggml_backend_tensor_set(&w, numbers.data(), 0, 15);
    ggml_backend_tensor_set(&w, reinterpret_cast<uint8_t *>(numbers.data()) + 5, 5, 3);
    std::vector<float> output(kRows * kOutputs), expected(output.size());
    op.data = output.data();
    EXPECT_EQ(Backend(2).Compute(&op), GGML_STATUS_SUCCESS) << logged;
    mha_linear_weights weights = support::Zeroed<mha_linear_weights>();
    weights.input_dim = kInputs, weights.output_dim = kOutputs;
    weights.w.data = numbers.data(), weights.layout = MHA_LAYOUT_OUT_IN;
    weights.type = weights.format.type = MHA_TYPE_BF16;
    weights.format.arithmetic = MHA_ARITHMETIC_BF16;
    mha_layer *layer = nullptr;
    ASSERT_EQ(mha_linear_create(&weights, nullptr, &layer, nullptr), MHA_OK);
    mha_linear_args args = support::Zeroed<mha_linear_args>();
    args.rows = kRows, args.x.data = x.bytes.data(), args.output.data = expected.data();
    std::vector<char> workspace(1 << 20);
    EXPECT_EQ(mha_linear(layer, &args, workspace.data(), workspace.size(), nullptr), MHA_OK);
    mha_layer_destroy(layer);
    EXPECT_EQ(output, expected);
  }
  ggml_backend_buffer_free(buffer);
}

// Such as those of a LoRA, which llama.cpp puts beside the weights that they change.
TEST(Ggml, LeavesOtherTensorsToTheCpu) {
  const ggml_backend_dev_t device = Device(1);
  const ggml_backend_buffer_type_t type = device->iface.get_buffer_type(device);
  const ggml_tensor wide = Weights(GGML_TYPE_Q8_0, int64_t{1} << 31, 1);
  EXPECT_EQ(type->iface.get_alloc_size(type, &wide), ggml_nbytes(&wide));
  for (ggml_tensor w : {Weights(GGML_TYPE_F16, 5, 3), Weights(GGML_TYPE_F32, 96, 7),
                        Weights(GGML_TYPE_Q4_0, 64, 8, 3)}) {
    SCOPED_TRACE(ggml_type_name(w.type));
    const ggml_backend_buffer_t buffer = Put(&w);
    const std::vector<uint8_t> bytes = RandomBytes(ggml_nbytes(&w));
    EXPECT_EQ(buffer->size, bytes.size());
    ggml_backend_tensor_set(&w, bytes.data(), 0, bytes.size());
    EXPECT_TRUE(ggml_backend_buft_is_host(w.buffer->buft)) << "is copied for each operation";
    EXPECT_EQ(std::memcmp(w.data, bytes.data(), bytes.size()), 0);
    ggml_tensor x = Weights(GGML_TYPE_F32, w.ne[0], 2), op = {};
    op.op = GGML_OP_MUL_MAT, op.src[0] = &w, op.src[1] = &x;
    EXPECT_FALSE(device->iface.supports_op(device, &op));
    ggml_backend_buffer_free(buffer);
  }
}

// As llama.cpp asks, whose matrices lie in a buffer of no bytes then: twice, if it measures first.
void ReadModel(std::vector<std::pair<const char *, ggml_tensor>> matrices) {
  const ggml_backend_dev_t device = Device(1);
  const ggml_backend_buffer_t buffer =
      ggml_backend_buft_alloc_buffer(device->iface.get_buffer_type(device), 0);
  for (int times = 0; times < 2; times++) {
    for (auto &[name, w] : matrices) {
      std::strcpy(w.name, name);
      w.buffer = buffer;
      ggml_tensor x = Weights(GGML_TYPE_F32, w.ne[0], 1), ids = Weights(GGML_TYPE_I32, 7, 1);
      ggml_tensor multiply = {}, get = {};
      multiply.op = w.ne[2] > 1 ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT, get.op = GGML_OP_GET_ROWS;
      multiply.src[0] = get.src[0] = &w, multiply.src[1] = &x, get.src[1] = &ids;
      device->iface.supports_op(device, &multiply), device->iface.supports_op(device, &get);
    }
  }
  ggml_backend_buffer_free(buffer);
}

TEST(Ggml, SaysWhatItIsAndWhatItTookOfEachModel) {
  const auto said = [] { return std::exchange(noticed, ""); };
  said();
  Backend backend(1), of_weights(1, 1);
  const uint32_t best = mha_instruction_sets();
  said();
  Device();
  const std::string loaded = said();
  EXPECT_EQ(loaded.rfind("mha: loaded MHA backend, version 0.", 0), 0u) << loaded;
  EXPECT_EQ(loaded.find('\n'), loaded.size() - 1) << loaded;
  bool is_one_of_them = false;
  for (uint32_t set = 1; set < 32; set++) {
    const std::string end = std::string(" with ") + mha_instruction_set_name(set) + "\n";
    is_one_of_them |= (best >> set & 1) && loaded.find(end) != std::string::npos;
  }
  EXPECT_TRUE(is_one_of_them) << loaded;

  Operation operation{Shape{}};
  RecurrentOperation recurrent{RecurrentShape{}};
  const auto compute = [&](int layers) {
    for (int times = 0; times < 2; times++) {  // two parts of a prompt
      for (int i = 0; i < layers; i++) {
        std::snprintf(operation.op.name, sizeof operation.op.name, "__fattn__-%d", i);
        EXPECT_EQ(backend.Compute(&operation.op), GGML_STATUS_SUCCESS);
      }
    }
  };
  const auto finish = [&] { of_weights.it->iface.synchronize(of_weights.it); };
  compute(1), finish();  // of what other tests asked
  const ggml_tensor q8 = Weights(GGML_TYPE_Q8_0, 64, 4), f16 = Weights(GGML_TYPE_F16, 64, 4);
  ReadModel({{"blk.0.a", q8}, {"blk.1.a", q8}, {"output.weight", f16}});
  said();
  finish();
  EXPECT_EQ(said(), "") << "a context that is made, before a graph";
  compute(12);
  backend.it->iface.synchronize(backend.it);  // as after each part of a graph
  EXPECT_EQ(said(), "") << "before its end";
  finish();
  const std::string first = "mha: attention of 12 layers, 2 of 3 matrices; left to the CPU: ";
  EXPECT_EQ(said(), first + "output.weight (f16)\n");
  compute(12), finish();
  EXPECT_EQ(said(), "") << "once";

  ReadModel({{"blk.0.a", q8}, {"output.weight", q8}});
  EXPECT_EQ(backend.Compute(&recurrent.op), GGML_STATUS_SUCCESS);
  said(), finish();
  EXPECT_EQ(said(), "mha: attention of 0 layers, recurrent attention of 1, 2 of 2 matrices\n");
  ReadModel({{"blk.0.a", f16}, {"blk.1.a", f16}, {"experts", Weights(GGML_TYPE_Q4_0, 64, 4, 3)}});
  compute(1), said(), finish();
  EXPECT_EQ(said(),
            "mha: attention of 1 layers, 0 of 3 matrices; left to the CPU: 2 (f16),"
            " experts (q4_0)\n");

  for (const char *value : {"1", "0", ""}) {
    setenv("MHA_GGML_QUIET", value, 1);
    ReadModel({{"a", q8}}), compute(1), finish();
    EXPECT_EQ(said().empty(), *value == '1') << value;
  }
  unsetenv("MHA_GGML_QUIET");
}

TEST(Ggml, RefusesAnotherGgml) {
  const auto refusal = [] {
    logged.clear();
    EXPECT_EQ(Register(), nullptr);
    return logged;
  };
  const auto expect = [](const std::string &said, const char *part) {
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  for (const char *other : {"0.14.9", "0.26.0", "1.20.0", "unknown"}) {
    stub_set_version(other);
    expect(refusal(), other);
  }
  stub_set_version("0.15.0");
  EXPECT_NE(Register(), nullptr);
  stub_set_version("0.25.3");
  stub_set_tensor_overhead(ggml_tensor_overhead() + 8);
  expect(refusal(), "ggml_tensor_overhead() is ");
  stub_set_tensor_overhead(ggml_tensor_overhead() - 8);
  for (const char *name :
       {"NONE", "VIEW", "FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "GATED_DELTA_NET",
        "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_K", "q5_K", "q6_K"}) {
    stub_rename(name);
    expect(refusal(), (std::string("another where this module expects ") + name).c_str());
  }
  stub_rename("");
  EXPECT_NE(Register(), nullptr);
}

}  // namespace
