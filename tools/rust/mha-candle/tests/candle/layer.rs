use std::collections::HashMap;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Linear, VarBuilder};
use mha_candle::mha::{Arithmetic, RopeConfig, StorageType};
use mha_candle::{AttentionConfig, KvCache, Names, Parts, Rope, SelfAttention};

use crate::support::{assert_near, bits, difference, in_pool, numbers, sentence, tensor};

const WIDTH: usize = 48;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;

fn config() -> AttentionConfig {
    let rope = Rope::new(&RopeConfig::new(HEAD_DIM), 512).unwrap();
    AttentionConfig::new(WIDTH, HEADS).kv_heads(KV_HEADS).head_dim(HEAD_DIM).causal().rope(&rope)
}

fn weights() -> HashMap<String, Tensor> {
    let (columns, kv_columns) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let shapes: [(&str, &[usize]); 9] = [
        ("q_proj.weight", &[columns, WIDTH]),
        ("k_proj.weight", &[kv_columns, WIDTH]),
        ("v_proj.weight", &[kv_columns, WIDTH]),
        ("o_proj.weight", &[WIDTH, columns]),
        ("q_proj.bias", &[columns]),
        ("v_proj.bias", &[kv_columns]),
        ("o_proj.bias", &[WIDTH]),
        ("q_norm.weight", &[HEAD_DIM]),
        ("k_norm.weight", &[HEAD_DIM]),
    ];
    let weight = |(seed, (name, shape)): (usize, (&str, &[usize]))| (name.to_owned(), (tensor(seed as u64 + 20, shape) * 0.15).unwrap());
    shapes.into_iter().enumerate().map(weight).collect()
}

fn var_builder(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights(), dtype, &Device::Cpu)
}

/// By candle's own operations: weights that are variables are left to them.
fn stock(config: &AttentionConfig) -> SelfAttention {
    let vars = weights().into_iter().map(|(name, weight)| (name, Var::from_tensor(&weight).unwrap().as_tensor().clone())).collect();
    let layer = config.load(VarBuilder::from_tensors(vars, DType::F32, &Device::Cpu)).unwrap();
    assert!(layer.layer().is_none());
    layer
}

fn x(batch: usize, rows: usize) -> Tensor {
    tensor(40, &[batch, rows, WIDTH])
}

#[test]
fn a_packed_layer_agrees_with_candles_operations() -> Result<()> {
    let plain = AttentionConfig::new(WIDTH, HEADS).kv_heads(KV_HEADS).head_dim(HEAD_DIM);
    let half_turned = Rope::new(&RopeConfig::new(HEAD_DIM / 2), 512)?;
    let configs = [
        plain.clone(),
        config(),
        config().qk_norm(1e-5),
        config().window_left(3).softcap(2.0).scale(0.5),
        plain.clone().causal().rope(&half_turned),
        plain.causal().rope(&Rope::new(&RopeConfig::new(HEAD_DIM).base(500.0), 512)?.interleaved()),
    ];
    for config in configs {
        let (packed, stock) = (config.load(var_builder(DType::F32))?, stock(&config));
        assert!(packed.layer().is_some());
        for (batch, rows) in [(1, 1), (1, 9), (3, 20)] {
            let x = x(batch, rows);
            assert_near(&packed.forward(&x)?, &stock.forward(&x)?, 3e-6);
        }
        let (mut cache, mut candles) = (KvCache::new(), KvCache::new());
        for (offset, rows) in [(0, 5), (5, 1), (6, 3), (7, 2), (0, 4)] {
            let x = x(2, 10).narrow(1, offset, rows)?;
            assert_near(&packed.forward_cached(&x, offset, &mut cache)?, &stock.forward_cached(&x, offset, &mut candles)?, 3e-6);
            assert_eq!((cache.length(), candles.length()), (offset + rows, offset + rows));
        }
    }
    Ok(())
}

#[test]
fn norms_of_all_heads_together_agree() -> Result<()> {
    let config = config().qk_norm_of_all_heads(1e-5);
    let mut all = weights();
    all.insert("q_norm.weight".into(), tensor(1, &[HEADS * HEAD_DIM]));
    all.insert("k_norm.weight".into(), tensor(2, &[KV_HEADS * HEAD_DIM]));
    let packed = config.load(VarBuilder::from_tensors(all.clone(), DType::F32, &Device::Cpu))?;
    let vars = all.into_iter().map(|(name, weight)| (name, Var::from_tensor(&weight).unwrap().as_tensor().clone())).collect();
    let stock = config.load(VarBuilder::from_tensors(vars, DType::F32, &Device::Cpu))?;
    assert_near(&packed.forward(&x(2, 7))?, &stock.forward(&x(2, 7))?, 3e-6);
    Ok(())
}

#[test]
fn rows_have_the_same_bits_wherever_a_prompt_is_cut_and_while_the_cache_grows() -> Result<()> {
    let layer = config().qk_norm(1e-5).load(var_builder(DType::F32))?;
    let x = x(2, 300); // more than a cache begins with
    let whole = layer.forward(&x)?;
    let mut large = KvCache::new().capacity(512);
    assert_eq!(bits(&layer.forward_cached(&x, 0, &mut large)?), bits(&whole));
    for cuts in [vec![1], vec![299], vec![7, 8, 9], vec![250, 260, 270], vec![100, 257]] {
        let (mut cache, mut first, mut parts) = (KvCache::new(), 0, Vec::new());
        for end in cuts.into_iter().chain([300]) {
            parts.push(layer.forward_cached(&x.narrow(1, first, end - first)?, first, &mut cache)?);
            first = end;
        }
        assert_eq!(bits(&Tensor::cat(&parts, 1)?), bits(&whole));
    }
    // Generated tokens
    let mut cache = KvCache::new();
    layer.forward_cached(&x.narrow(1, 0, 240)?, 0, &mut cache)?;
    for row in 240..300 {
        assert_eq!(bits(&layer.forward_cached(&x.narrow(1, row, 1)?, row, &mut cache)?), bits(&whole.narrow(1, row, 1)?));
    }
    Ok(())
}

#[test]
fn batches_threads_and_strides_do_not_change_bits() -> Result<()> {
    let layer = config().load(var_builder(DType::F32))?;
    let x = x(8, 31);
    let together = layer.forward(&x)?;
    for i in 0..8 {
        assert_eq!(bits(&layer.forward(&x.narrow(0, i, 1)?)?), bits(&together.narrow(0, i, 1)?));
    }
    for threads in [1, 2, 3] {
        assert_eq!(in_pool(threads, || bits(&layer.forward(&x).unwrap())), bits(&together));
    }
    let rows_outside = x.transpose(0, 1)?.contiguous()?.transpose(0, 1)?; // [rows, batch, width] in memory
    assert_eq!(bits(&layer.forward(&rows_outside)?), bits(&together));
    let wider = Tensor::cat(&[&x, &x], 2)?.narrow(2, WIDTH, WIDTH)?;
    assert_eq!(bits(&layer.forward(&wider)?), bits(&together));
    let one = x.narrow(0, 2, 1)?.broadcast_as((8, 31, WIDTH))?;
    assert_eq!(bits(&layer.forward(&one)?.narrow(0, 5, 1)?), bits(&together.narrow(0, 2, 1)?));
    Ok(())
}

#[test]
fn sequences_of_several_lengths_go_together() -> Result<()> {
    let layer = config().load(var_builder(DType::F32))?;
    let (x, lengths) = (x(3, 12), [12, 5, 9]);
    let mut cache = KvCache::new();
    let prompt = layer.call(&x).lengths(&lengths).cache(&mut cache).run()?;
    let token = tensor(41, &[3, 1, WIDTH]);
    let next = layer.call(&token).cache(&mut cache).run()?;
    let left = layer.call(&x).starts(&[0, 7, 3]).run()?;
    for (i, length) in lengths.into_iter().enumerate() {
        let mut alone = KvCache::new();
        let rows = layer.forward_cached(&x.narrow(0, i, 1)?.narrow(1, 0, length)?, 0, &mut alone)?;
        assert_eq!(bits(&prompt.narrow(0, i, 1)?.narrow(1, 0, length)?), bits(&rows));
        let row = layer.forward_cached(&token.narrow(0, i, 1)?, length, &mut alone)?;
        assert_eq!(bits(&next.narrow(0, i, 1)?), bits(&row));
        let rows = layer.forward(&x.narrow(0, i, 1)?.narrow(1, 12 - length, length)?)?;
        assert_eq!(bits(&left.narrow(0, i, 1)?.narrow(1, 12 - length, length)?), bits(&rows));
    }
    assert_eq!(numbers(&prompt.narrow(0, 1, 1)?.narrow(1, 5, 7)?), [0.0; 7 * WIDTH]);
    Ok(())
}

#[test]
fn masks_and_biases_cover_the_keys_of_the_cache() -> Result<()> {
    let config = AttentionConfig::new(WIDTH, HEADS).kv_heads(KV_HEADS).head_dim(HEAD_DIM);
    let (packed, stock) = (config.load(var_builder(DType::F32))?, stock(&config));
    let x = x(2, 9);
    let bias = tensor(3, &[2, 1, 9, 9]);
    let mask = tensor(4, &[9, 9]).ge(-1f32)?;
    let run = |layer: &SelfAttention| {
        let mut cache = KvCache::new();
        let (first, rest) = (x.narrow(1, 0, 6)?, x.narrow(1, 6, 3)?);
        let of_first = |pairs: &Tensor| pairs.narrow(pairs.rank() - 2, 0, 6)?.narrow(pairs.rank() - 1, 0, 6);
        let of_rest = |pairs: &Tensor| pairs.narrow(pairs.rank() - 2, 6, 3);
        let first = layer.call(&first).bias(&of_first(&bias)?).mask(&of_first(&mask)?).cache(&mut cache).run()?;
        let rest = layer.call(&rest).bias(&of_rest(&bias)?).mask(&of_rest(&mask)?).cache(&mut cache).run()?;
        Tensor::cat(&[first, rest], 1)
    };
    assert_near(&run(&packed)?, &run(&stock)?, 3e-6);
    let wrong = sentence(packed.call(&x).bias(&bias.narrow(3, 0, 8)?).run());
    assert_eq!(wrong, "a mask or bias is [2, 1, 9, 8]; it must broadcast to [batch, heads, rows, keys], [2, 6, 9, 9]");
    Ok(())
}

#[test]
fn weights_rows_and_caches_have_the_types_they_are_asked_for() -> Result<()> {
    let exact = config().load(var_builder(DType::F32))?;
    let (x, expected) = (x(2, 20), exact.forward(&x(2, 20))?);
    for (dtype, kind, tolerance) in [(DType::F16, StorageType::F16, 2e-3), (DType::BF16, StorageType::Bf16, 2e-2)] {
        let layer = config().load(var_builder(dtype))?;
        assert_eq!(layer.layer().unwrap().shape().weight_type, kind);
        assert_near(&layer.forward(&x)?, &expected, tolerance);
        let y = layer.forward(&x.to_dtype(dtype)?)?;
        assert_eq!(y.dtype(), dtype);
        assert_near(&y, &expected, 2.0 * tolerance);
        // Of a type that differs from the weights'
        assert_eq!(exact.forward(&x.to_dtype(dtype)?)?.dtype(), dtype);
    }
    for (kind, tolerance) in [(StorageType::Int8, 3e-2), (StorageType::Int4, 0.4)] {
        let layer = config().weight_type(kind).load(var_builder(DType::F32))?;
        assert_eq!(layer.layer().unwrap().shape().weight_type, kind);
        let apart = difference(&layer.forward(&x)?, &expected);
        assert!(apart > 1e-5 && apart < tolerance, "{kind:?}: {apart}");
        for arithmetic in [Arithmetic::Int8, Arithmetic::Int16] {
            let integers = config().weight_type(kind).arithmetic(arithmetic).load(var_builder(DType::F32))?;
            assert_eq!(integers.layer().unwrap().shape().arithmetic, arithmetic);
            let y = integers.forward(&x)?;
            assert!(difference(&y, &expected) < tolerance && bits(&y) != bits(&layer.forward(&x)?), "{kind:?}, {arithmetic:?}");
        }
    }
    let refused = sentence(config().arithmetic(Arithmetic::Int8).load(var_builder(DType::F32)));
    assert!(refused.contains("integers multiply weights of MHA_TYPE_INT8"), "{refused}");
    for (kind, tolerance) in [(StorageType::F16, 1e-3), (StorageType::Bf16, 1e-2), (StorageType::Int8, 2e-2)] {
        let mut cache = KvCache::new().storage(kind).capacity(20);
        let apart = difference(&exact.forward_cached(&x, 0, &mut cache)?, &expected);
        assert!(apart > 1e-6 && apart < tolerance, "{kind:?}: {apart}");
    }
    Ok(())
}

#[test]
fn a_cache_of_halves_grows_without_rounding_again() -> Result<()> {
    let layer = config().load(var_builder(DType::F32))?;
    let x = x(1, 300);
    for kind in [StorageType::F16, StorageType::Bf16] {
        let (mut growing, mut large) = (KvCache::new().storage(kind), KvCache::new().storage(kind).capacity(300));
        for (offset, rows) in [(0, 200), (200, 99), (299, 1)] {
            let x = x.narrow(1, offset, rows)?;
            let expected = layer.forward_cached(&x, offset, &mut large)?;
            assert_eq!(bits(&layer.forward_cached(&x, offset, &mut growing)?), bits(&expected));
        }
    }
    Ok(())
}

#[test]
fn a_fused_projection_is_three_views() -> Result<()> {
    let all = weights();
    let (columns, kv_columns) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let fused = Tensor::cat(&[&all["q_proj.weight"], &all["k_proj.weight"], &all["v_proj.weight"]], 0)?;
    let part = |first, rows, bias: Option<&str>| {
        Ok::<_, candle_core::Error>(Linear::new(fused.narrow(0, first, rows)?, bias.map(|name| all[name].clone())))
    };
    let (q, k) = (part(0, columns, Some("q_proj.bias"))?, part(columns, kv_columns, None)?);
    let v = part(columns + kv_columns, kv_columns, Some("v_proj.bias"))?;
    let o = Linear::new(all["o_proj.weight"].t()?.contiguous()?.t()?, Some(all["o_proj.bias"].clone())); // [in, out] in memory
    let layer = config().build(Parts::new(&q, &k, &v).output(&o))?;
    let loaded = config().load(var_builder(DType::F32))?;
    assert_eq!(bits(&layer.forward(&x(2, 5))?), bits(&loaded.forward(&x(2, 5))?));
    // Without a projection of the output: the heads side by side
    let heads = config().build(Parts::new(&q, &k, &v))?.forward(&x(2, 5))?;
    assert_eq!(heads.dims(), [2, 5, columns]);
    assert_near(&o.forward(&heads)?, &loaded.forward(&x(2, 5))?, 2e-6);
    Ok(())
}

#[test]
fn tables_of_the_models_own_are_the_same_rotation() -> Result<()> {
    let tables = RopeConfig::new(HEAD_DIM).tables(64).unwrap();
    let table = |numbers: &[f32]| Tensor::from_slice(numbers, (64, HEAD_DIM / 2), &Device::Cpu);
    let rope = Rope::from_tensors(&table(tables.cos())?, &table(tables.sin())?)?;
    let (theirs, ours) = (config().rope(&rope).load(var_builder(DType::F32))?, config().load(var_builder(DType::F32))?);
    assert_eq!(bits(&theirs.forward(&x(1, 60))?), bits(&ours.forward(&x(1, 60))?));
    let interleaved = config().rope(&rope.interleaved()).load(var_builder(DType::F32))?;
    assert!(difference(&interleaved.forward(&x(1, 60))?, &ours.forward(&x(1, 60))?) > 1e-3);
    assert!(sentence(theirs.forward(&x(1, 65))).contains("64"), "{}", sentence(theirs.forward(&x(1, 65))));
    assert!(sentence(Rope::from_tensors(&table(tables.cos())?, &x(1, 2))).starts_with("cos is [64, 8] and sin [1, 2, 48]"));
    Ok(())
}

#[test]
fn what_needs_gradients_runs_by_candles_operations_if_the_weights_are_there() -> Result<()> {
    let (var, wanted) = (Var::from_tensor(&x(1, 5))?, config().load(var_builder(DType::F32))?.forward(&x(1, 5))?);
    let kept = config().keep_weights().load(var_builder(DType::F32))?;
    let y = kept.forward(&var)?;
    assert_near(&y, &wanted, 3e-6);
    assert!(y.sum_all()?.backward()?.get(&var).is_some());

    let gradient = "x needs a gradient, which mha does not compute: detach() it, or load weights that are no Var";
    let packed = config().load(var_builder(DType::F32))?;
    let expected = format!("{gradient}. The weights are packed; keep_weights() lets candle's own operations run instead");
    assert_eq!(sentence(packed.forward(&var)), expected);
    let strict = config().keep_weights().strict().load(var_builder(DType::F32))?;
    assert_eq!(sentence(strict.forward(&var)), gradient);
    assert_eq!(bits(&strict.forward(&var.detach())?), bits(&wanted));

    let vars = weights().into_iter().map(|(name, weight)| (name, Var::from_tensor(&weight).unwrap().as_tensor().clone())).collect();
    let refused = sentence(config().strict().load(VarBuilder::from_tensors(vars, DType::F32, &Device::Cpu)));
    assert_eq!(refused, "q needs a gradient, which mha does not compute: detach() it, or load weights that are no Var");
    let refused = sentence(config().strict().load(var_builder(DType::F64)));
    assert_eq!(refused, "q is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype");
    // Doubles run by candle's own
    let doubles = config().load(var_builder(DType::F64))?.forward(&x(1, 5).to_dtype(DType::F64)?)?;
    assert_near(&doubles, &wanted, 3e-6);
    Ok(())
}

#[test]
fn a_cache_says_what_does_not_fit_and_stays_as_it_was() -> Result<()> {
    let layer = config().load(var_builder(DType::F32))?;
    let mut cache = KvCache::new().capacity(8);
    let (x, token) = (x(2, 9), tensor(41, &[2, 1, WIDTH]));
    layer.forward_cached(&x.narrow(1, 0, 7)?, 0, &mut cache)?;
    let expected = bits(&layer.forward_cached(&token, 7, &mut cache.clone())?);
    let full = sentence(layer.forward_cached(&x.narrow(1, 0, 2)?, 7, &mut cache));
    assert_eq!(full, "the length of sequence 0 is 7, with room for 1 more, not 2; truncate it or use a larger cache");
    let gap = sentence(layer.forward_cached(&token, 9, &mut cache));
    assert_eq!(gap, "offset is 9, but the cache holds 7 positions; pass as many, or fewer to forget the last ones");
    let batch = sentence(layer.forward_cached(&token.narrow(0, 0, 1)?, 7, &mut cache));
    assert_eq!(batch, "the cache holds 2 sequences, but the call has 1; reset() it, or pass as many");
    assert_eq!(cache.length(), 7);
    assert_eq!(bits(&layer.forward_cached(&token, 7, &mut cache)?), expected);

    let mixed = sentence(stock(&config()).forward_cached(&token, 8, &mut cache));
    assert_eq!(mixed, "the cache holds what mha computed; reset() it before calls by candle's own operations");
    cache.reset();
    assert_eq!(cache.length(), 0);
    assert!(layer.forward_cached(&token.narrow(0, 0, 1)?, 0, &mut cache).is_ok()); // another batch
    assert!(layer.forward_cached(&token, 0, &mut cache).is_ok()); // and another, from the beginning
    let growing = sentence(layer.forward_cached(&token, 0, &mut KvCache::new().storage(StorageType::Int8)));
    assert_eq!(growing, "a cache of int8 cannot grow without rounding again; say its capacity()");
    assert_eq!(sentence(layer.call(&token).offset(3).run()), "there is an offset, but no cache() that holds the rows before it");
    Ok(())
}

#[test]
fn wrong_shapes_are_errors_with_a_sentence() {
    let layer = config().load(var_builder(DType::F32)).unwrap();
    assert_eq!(sentence(layer.forward(&tensor(1, &[2, 3, 40]))), "x is [2, 3, 40]; it must be [batch, rows, 48]");
    assert_eq!(sentence(layer.call(&x(2, 3)).lengths(&[1]).run()), "lengths are 1, but there are 2 sequences");
    let linear = |outputs: usize| Linear::new(tensor(1, &[outputs, WIDTH]), None);
    let parts = Parts::new(&linear(96), &linear(32), &linear(31));
    assert_eq!(sentence(config().build(parts)), "v is [31, 48] with the bias None; it must be [32, 48]");
    let parts = Parts::new(&linear(96), &linear(32), &linear(32));
    assert_eq!(
        sentence(config().qk_norm(1e-5).build(parts.clone())),
        "there is no q_norm, which qk_norm() needs: add it by Parts::norms()"
    );
    let normed = parts.clone().norms(&tensor(1, &[16]), &tensor(1, &[8]));
    assert_eq!(sentence(config().build(normed.clone())), "there is a q_norm, but no epsilon for it: set qk_norm()");
    assert_eq!(sentence(config().qk_norm(1e-5).build(normed)), "k_norm is [8]; it must be [16]");
    assert!(sentence(config().kv_heads(5).build(parts)).contains("it must be [80, 48]"));
    let missing = config().load_named(var_builder(DType::F32), &Names::bert());
    assert!(missing.is_err());
}
