//! Settings that contradict each other, or that do nothing, are errors that name them.

use mha::{
    Attention, CacheConfig, CausalConv, ContextNorm, Gate, KvCache, Layer, LayerConfig, Matrix,
    Norm, Outputs, RecurrentAttention, RopeConfig, ScoreColumns, ScoreOptions, Strides, Type,
    Weights,
};

use crate::support::Alone;

#[test]
fn settings_that_contradict_each_other_or_do_nothing_are_refused() {
    let (x, w, mut chosen) = ([1.0f32; 12], [0.25f32; 64], [0; 3]);
    let (config, fused) = (LayerConfig::new(4, 2), Weights::fused(&w[..48]));
    let (layer, tables) =
        (Layer::new(&config, &fused).unwrap(), RopeConfig::new(2).tables(8).unwrap());
    let (of_linear, square) = (LayerConfig::linear(4, 4), Weights::linear(&w[..16]));
    let linear = Layer::new(&of_linear, &square).unwrap();
    let of_layer = CacheConfig::for_layer(layer.shape(), 16);
    let [cache, mut other, mut keys_alone] = [of_layer, of_layer, of_layer.values_in_keys(true)]
        .map(|config| KvCache::new(&config).unwrap());
    KvCache::new(keys_alone.shape()).unwrap();
    let (attention, conv) = (Attention::new(2, 2), CausalConv::new(4, 2, &w[..8]));
    let (recurrent, context) = (RecurrentAttention::new(2, 2), ContextNorm::rms(1e-5));
    let (pair, lists) = (Strides::heads_first(2, 3, 2), [0, 1, 2]);
    macro_rules! run {
        (config $set:tt $($more:tt)*) => { Layer::new(&config$set$($more)*, &fused).map(drop) };
        (weights $($set:tt)*) => { Layer::new(&config, &fused.clone()$($set)*).map(drop) };
        (of_linear $($set:tt)*) => { Layer::new(&of_linear$($set)*, &square).map(drop) };
        (square $($set:tt)*) => { Layer::new(&of_linear, &square.clone()$($set)*).map(drop) };
        (cache $($set:tt)*) => { KvCache::new(&CacheConfig::new(16, 2, 2)$($set)*).map(drop) };
        (rope $($set:tt)*) => { RopeConfig::new(2)$($set)*.tables(2).map(drop) };
        (norm $($set:tt)*) => { run!(forward.norm(Norm$($set)*)) };
        (score $($set:tt)*) => { run!(forward.score(ScoreOptions::new()$($set)*)) };
        (forward $($set:tt)*) => { run!(call layer.forward(&x, &mut [0.0; 12])$($set)*) };
        (attention $($set:tt)*) => {
            run!(call attention.call(&x, &mut [0.0; 12])$($set)*.key_value(&x, &x))
        };
        (states $($set:tt)*) => {
            run!(call attention.call_partials(&x, &mut [0.0; 24]).key_value(&x, &x)$($set)*)
        };
        (choose $($set:tt)*) => {
            run!(call attention.choose_keys(&x, &w[..6], 1, &mut chosen).key(&x[..6])$($set)*)
        };
        (linear $($set:tt)*) => { run!(call linear.linear(&x, &mut [0.0; 12])$($set)*) };
        (recurrent $($set:tt)*) => {
            run!(call recurrent.call(&x, &x, &x, &mut [0.0; 12])$($set)*)
        };
        (conv $($set:tt)*) => { run!(call conv.call(&x, &mut [0.0; 12])$($set)*) };
        (call $($call:tt)*) => { $($call)*.alone() };
    }
    macro_rules! refused {
        ($([$($set:tt)*] $name:literal)*) => {$(
            let sentence = run!($($set)*).expect_err(stringify!($($set)*)).to_string();
            assert!(sentence.contains($name), "{}: {sentence}", stringify!($($set)*));
        )*};
    }
    refused! {
        [config.gate_dim(2)] "gate_dim"
        [config.group_size(32)] "group_size"
        [config.scale_type(Type::F16)] "scale_type"
        [config.output_dim(5)] "output_dim"
        [weights.fused_bias(&w[..12]).query_bias(&w[..4])] "w_q.bias"
        [weights.gate_bias(&w[..4])] "w_g.bias"
        [weights.gate(&w[..16])] "w_g"
        [weights.gate_in_query()] "gate_place"
        [weights.output_bias(&w[..4])] "w_o.bias"
        [of_linear.scale(2.0)] "num_heads"
        [square.output(&w[..16])] "output"
        [square.query_bias(&w[..4])] "num_heads"
        [square.output(Matrix::f32(&w[..16]).offsets(&w[..4]))] "output"
        [cache.values_in_keys(true).v_type(Type::F16)] "v_type"
        [rope.yarn_betas(2.0, 1.0)] "yarn_beta_fast"
        [rope.yarn_unrounded()] "yarn_unrounded"
        [rope.llama3_freq_factors(1.0, 2.0)] "llama3_low_freq_factor"
        [rope.yarn(2.0, 4).llama3(2.0, 8)] "llama3_factor"
        [rope.yarn(2.0, 4).dynamic_ntk(2.0, 8, 9)] "ntk_factor"
        [rope.yarn(2.0, 4).pair_factors(&[1.0])] "pair_factors"
        [norm::of_context(context).q_weight(&w[..2])] "epsilon"
        [norm::of_context(context).after_rope()] "epsilon"
        [norm::of_context(context).context(context)] "of_context"
        [norm::of_context(context.per_head())] "context.per_head"
        [norm::of_context(context.after_gate())] "after_gate"
        [norm::of_context(context.bias(&w[..2]))] "context_bias"
        [norm::rms(1e-5).per_head()] "per_head"
        [norm::rms(1e-5).q_bias(&w[..2])] "q_bias"
        [score.relative_bias(&w[..6], 1, 1).relative_rows(&w[..3], [1, 1, 1, 3], 1)] "relative"
        [score.column_keys(ScoreColumns::NewKeys)] "column_keys"
        [score.num_columns(3)] "num_columns"
        [forward.n_kv(2)] "n_kv"
        [forward.cache_read(&cache).n_kv(2)] "n_kv"
        [forward.key_strides(0, 4)] "key"
        [forward.value_strides(0, 4)] "value"
        [forward.kv_lengths(&[2])] "kv_lengths"
        [forward.kv_first_rows(&[2])] "kv_first_rows"
        [forward.cu_seqlens_q(&[0, 3]).cu_seqlens_kv(&[0, 3])] "cu_seqlens_kv"
        [forward.cu_seqlens_q(&[0, 3]).q_lengths(&[3])] "q_lengths"
        [forward.cache(&mut other).cache_read(&cache)] "cache_read"
        [forward.cache_read(&cache).cache(&mut other)] "cache_read"
        [forward.cache_read(&cache).key(&x)] "key"
        [forward.rope_q_positions(&lists)] "rope_q_positions"
        [forward.rope_k_positions(&lists)] "rope_k_positions"
        [forward.rope(&tables).cache_sequences(&[0])] "cache_sequences"
        [attention.key(&x)] "key_value"
        [attention.cache(&mut keys_alone)] "v.data"
        [attention.index_scores(&mut [0.0; 9])] "index_scores"
        [attention.outputs(Outputs::new().q(&mut [0.0; 12]))] "outputs.q"
        [states.lse(&mut [0.0; 6])] "lse"
        [states.output_strides(pair)] "output.strides"
        [states.score(ScoreOptions::new().sinks(&w[..2]))] "sinks"
        [choose.output_strides(pair)] "output_strides"
        [choose.v_strides(pair)] "v_strides"
        [choose.key_value(&x[..6], &x[..6])] "key_value"
        [choose.kv_first_position(3)] "kv_first_position"
        [choose.lse(&mut [0.0; 6])] "outputs"
        [call attention.num_kv_heads(2).choose_keys(&x, &w[..6], 1, &mut chosen).key(&x)] "num_kv"
        [call attention.head_dim_v(5).choose_keys(&x, &w[..6], 1, &mut chosen).key(&x[..6])]
            "head_dim_v"
        [call attention.scale(2.0).call(&x, &mut [0.0; 12]).key_value(&x, &x).equal_scores()]
            "scale"
        [linear.residual(&x).add_to_output()] "add_to_output"
        [linear.add_to_output().residual(&x)] "add_to_output"
        [linear.strides(3, 0, 8, 0)] "residual"
        [linear.add_to_output().strides(3, 0, 5, 4)] "residual"
        [recurrent.decay_strides(pair)] "decay_strides"
        [recurrent.beta_strides(pair)] "beta_strides"
        [recurrent.shared_beta(&w[..3]).beta_strides(pair)] "beta_strides"
        [recurrent.beta(&w[..6]).shared_beta(&w[..3])] "shared_beta"
        [recurrent.shared_beta(&w[..3]).beta(&w[..6])] "shared_beta"
        [recurrent.a_log(&w[..2])] "a_log"
        [recurrent.decay(&w[..6]).dt_bias(&w[..2])] "dt_bias"
        [call recurrent.decay_dim(2).call(&x, &x, &x, &mut [0.0; 12])] "decay_dim"
        [call recurrent.beta_function(Gate::Sigmoid).call(&x, &x, &x, &mut [0.0; 12])] "beta"
        [recurrent.state(&w[..8]).update_state(&mut [0.0; 8])] "update_state"
        [recurrent.update_state(&mut [0.0; 8]).state(&w[..8])] "update_state"
        [conv.state_out(&mut [0.0; 4]).update_state(&mut [0.0; 4])] "update_state"
        [conv.update_state(&mut [0.0; 4]).state_out(&mut [0.0; 4])] "update_state"
    }
}
