// The one set of fixtures: layers, calls and caches of any shape, for tests and benchmarks. They
// use mha.h and nothing else of the library, and throw the library's sentence where it returns an
// error. A test begins with a problem: sizes, who attends to whom, and the arrays,
//
//     support::Random random(1);
//     support::LayerProblem problem;  // or AttentionProblem, for mha_attention
//     problem.n_q = problem.n_kv = 20;
//     problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = 64;
//     problem.num_heads = problem.num_kv_heads = 4;
//     problem.head_dim = problem.head_dim_v = 16;
//     problem.is_causal = true;
//     FillNormal(&random, support::kAllBiases, true, &problem);
//
// and then asks for the outputs, in whatever form the library can be given the weights (LayerForm)
// or called (LayerCall in call.h):
//
//     const support::Layer layer = MakeLayer(problem);
//     EXPECT_TRUE(SameBits(Forward(layer.get(), problem), Specify(problem)));  // specify.h
//
// What lies between is there too: LayerData has the structs of a layer, ForwardData and
// AttentionData those of a call, to be changed before they are used. Every array is in memory of
// its own (memory.h), next to inaccessible pages if asked for. Cache is a cache (cache.h);
// attention_test.h repeats tests for every instruction set.
#ifndef MHA_TESTS_SUPPORT_FIXTURES_H
#define MHA_TESTS_SUPPORT_FIXTURES_H

#include "support/attention.h"
#include "support/cache.h"
#include "support/call.h"
#include "support/layer.h"
#include "support/memory.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/structs.h"

#endif  // MHA_TESTS_SUPPORT_FIXTURES_H
