use std::collections::HashMap;

use candle_core::{DType, Device, Module, Result, Tensor, Var, D};
use candle_nn::{rotary_emb, Linear, VarBuilder};
use mha_candle::mha::{Arithmetic, RopeConfig, Type};
use mha_candle::{AttentionConfig, KvCache, Names, Parts, Rope};

use crate::support::{
    assert_near, bias_where, bits, difference, in_pool, numbers, plain_attention, sentence, tensor,
};

const WIDTH: usize = 48;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const COLUMNS: usize = HEADS * HEAD_DIM;
const KV_COLUMNS: usize = KV_HEADS * HEAD_DIM;

fn plain_config() -> AttentionConfig {
    AttentionConfig::new(WIDTH, HEADS).num_kv_heads(KV_HEADS).head_dim(HEAD_DIM)
}

fn config() -> AttentionConfig {
    plain_config().causal().rope(&Rope::new(&RopeConfig::new(HEAD_DIM), 512).unwrap())
}

fn weights() -> HashMap<String, Tensor> {
    let shapes: [(&str, &[usize]); 7] = [
        ("q_proj.weight", &[COLUMNS, WIDTH]),
        ("k_proj.weight", &[KV_COLUMNS, WIDTH]),
        ("v_proj.weight", &[KV_COLUMNS, WIDTH]),
        ("o_proj.weight", &[WIDTH, COLUMNS]),
        ("q_proj.bias", &[COLUMNS]),
        ("v_proj.bias", &[KV_COLUMNS]),
        ("o_proj.bias", &[WIDTH]),
    ];
    let weight = |(seed, (name, shape)): (usize, (&str, &[usize]))| {
        (name.to_owned(), (tensor(seed as u64 + 20, shape) * 0.15).unwrap())
    };
    shapes.into_iter().enumerate().map(weight).collect()
}

fn var_builder(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights(), dtype, &Device::Cpu)
}

/// With more tensors than [`weights`] has.
fn with(more: &[(&str, Tensor)]) -> VarBuilder<'static> {
    let more = more.iter().map(|(name, tensor)| (name.to_string(), tensor.clone()));
    VarBuilder::from_tensors(weights().into_iter().chain(more).collect(), DType::F32, &Device::Cpu)
}

fn norms(q: usize, k: usize) -> [(&'static str, Tensor); 2] {
    [("q_norm.weight", tensor(1, &[q])), ("k_norm.weight", tensor(2, &[k]))]
}

fn x(batch: usize, rows: usize) -> Tensor {
    tensor(40, &[batch, rows, WIDTH])
}

/// The same layer by candle's own operations: `norm` is the width of a norm, `dims` how much of a
/// head is rotated in `style`.
#[derive(Clone, Copy)]
struct Plain {
    norm: Option<usize>,
    rope: Option<(usize, bool)>,
    is_causal: bool,
    window: usize,
    scale: f64,
    softcap: Option<f64>,
}

const PLAIN: Plain =
    Plain { norm: None, rope: None, is_causal: false, window: 1000, scale: 0.25, softcap: None };

impl Plain {
    fn forward(&self, vb: &VarBuilder, x: &Tensor) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        let linear = |name: &str, x: &Tensor, outputs: usize| {
            let bias = vb.pp(name).get(outputs, "bias").ok();
            Linear::new(vb.pp(name).get((outputs, x.dim(D::Minus1)?), "weight")?, bias).forward(x)
        };
        let heads = |name: &str, outputs: usize| {
            let mut y = linear(&format!("{name}_proj"), x, outputs)?;
            if let (Some(width), true) = (self.norm, name != "v") {
                let width = if width == HEAD_DIM { width } else { outputs };
                let weight = vb.pp(format!("{name}_norm")).get(width, "weight")?;
                let each = y.reshape((batch, rows, outputs / width, width))?.contiguous()?;
                y = candle_nn::ops::rms_norm_slow(&each, &weight, 1e-5)?.flatten_from(2)?;
            }
            let y = y
                .reshape((batch, rows, outputs / HEAD_DIM, HEAD_DIM))?
                .transpose(1, 2)?
                .contiguous()?;
            let Some((dims, is_interleaved)) = self.rope.filter(|_| name != "v") else {
                return Ok(y);
            };
            let tables = RopeConfig::new(dims).tables(rows).unwrap();
            let table =
                |numbers: &[f32]| Tensor::from_slice(numbers, (rows, dims / 2), &Device::Cpu);
            let (cos, sin, turned) =
                (table(tables.cos())?, table(tables.sin())?, y.narrow(3, 0, dims)?.contiguous()?);
            let turn = if is_interleaved { rotary_emb::rope_i_slow } else { rotary_emb::rope_slow };
            Tensor::cat(&[turn(&turned, &cos, &sin)?, y.narrow(3, dims, HEAD_DIM - dims)?], 3)
        };
        let bias = bias_where(rows, rows, 0, |row, key| {
            key + self.window >= row && (key <= row || !self.is_causal)
        });
        let (q, k, v) = (heads("q", COLUMNS)?, heads("k", KV_COLUMNS)?, heads("v", KV_COLUMNS)?);
        let y = plain_attention(&q, &k, &v, self.scale, self.softcap, Some(&bias))?
            .to_dtype(DType::F32)?;
        linear("o_proj", &y.transpose(1, 2)?.flatten_from(2)?, WIDTH)
    }
}

#[test]
fn a_layer_agrees_with_candles_operations() -> Result<()> {
    let decoder = Plain { rope: Some((HEAD_DIM, false)), is_causal: true, ..PLAIN };
    let (normed, of_all) = (with(&norms(HEAD_DIM, HEAD_DIM)), with(&norms(COLUMNS, KV_COLUMNS)));
    let rope = |dims: usize| Rope::new(&RopeConfig::new(dims), 512).unwrap();
    let vb = || var_builder(DType::F32);
    let cases = [
        (plain_config(), PLAIN, vb()),
        (config(), decoder, vb()),
        (config().qk_norm(1e-5), Plain { norm: Some(HEAD_DIM), ..decoder }, normed),
        (config().qk_norm_of_all_heads(1e-5), Plain { norm: Some(COLUMNS), ..decoder }, of_all),
        (
            config().window_left(3).softcap(2.0).scale(0.5),
            Plain { window: 3, softcap: Some(2.0), scale: 0.5, ..decoder },
            vb(),
        ),
        (
            plain_config().causal().rope(&rope(HEAD_DIM / 2)),
            Plain { rope: Some((HEAD_DIM / 2, false)), ..decoder },
            vb(),
        ),
        (
            plain_config().causal().rope(&rope(HEAD_DIM).interleaved()),
            Plain { rope: Some((HEAD_DIM, true)), ..decoder },
            vb(),
        ),
    ];
    for (config, plain, vb) in cases {
        let layer = config.load(vb.clone())?;
        for (batch, rows) in [(1, 1), (1, 9), (3, 20)] {
            assert_near(
                &layer.forward(&x(batch, rows))?,
                &plain.forward(&vb, &x(batch, rows))?,
                5e-6,
            );
        }
    }
    Ok(())
}

#[test]
fn weights_that_would_not_be_used_are_refused() {
    let said = |config: &AttentionConfig, name: &str| {
        sentence(config.load(with(&[(name, tensor(1, &[HEAD_DIM]))])))
    };
    let norm = "which would not be used: set qk_norm(), which has weights and no biases";
    assert_eq!(said(&config(), "q_norm.weight"), format!("the weights have q_norm.weight, {norm}"));
    assert_eq!(
        said(&config().qk_norm(1e-5), "k_norm.bias"),
        format!("the weights have k_norm.bias, {norm}")
    );
    let model = "which would not be used: this layer is for candle's own attention";
    assert_eq!(said(&config(), "sinks"), format!("the weights have sinks, {model}"));
    assert_eq!(
        said(&config(), "gate_proj.weight"),
        format!("the weights have gate_proj.weight, {model}")
    );
    assert!(said(&config(), "o_proj.lora_B.weight")
        .starts_with("the weights have o_proj.lora_B.weight, which would not be used"));
    assert!(config().load(VarBuilder::zeros(DType::F32, &Device::Cpu)).is_ok());
    // which says that it has any name
}

#[test]
fn rows_have_the_same_bits_wherever_a_prompt_is_cut_and_while_the_cache_grows() -> Result<()> {
    let layer = config().qk_norm(1e-5).load(with(&norms(HEAD_DIM, HEAD_DIM)))?;
    let x = x(2, 300); // more than a cache begins with
    let whole = layer.forward(&x)?;
    let mut large = KvCache::new().capacity(512);
    assert_eq!(bits(&layer.forward_cached(&x, 0, &mut large)?), bits(&whole));
    for cuts in [vec![1], vec![299], vec![7, 8, 9], vec![250, 260, 270], vec![100, 257]] {
        let (mut cache, mut first, mut parts) = (KvCache::new(), 0, Vec::new());
        for end in cuts.into_iter().chain([300]) {
            parts.push(layer.forward_cached(
                &x.narrow(1, first, end - first)?,
                first,
                &mut cache,
            )?);
            first = end;
        }
        assert_eq!(bits(&Tensor::cat(&parts, 1)?), bits(&whole));
    }
    // Generated tokens
    let mut cache = KvCache::new();
    layer.forward_cached(&x.narrow(1, 0, 240)?, 0, &mut cache)?;
    for row in 240..300 {
        assert_eq!(
            bits(&layer.forward_cached(&x.narrow(1, row, 1)?, row, &mut cache)?),
            bits(&whole.narrow(1, row, 1)?)
        );
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
    // [rows, batch, width] in memory
    let rows_outside = x.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
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
    for (i, length) in lengths.into_iter().enumerate() {
        let mut alone = KvCache::new();
        let rows =
            layer.forward_cached(&x.narrow(0, i, 1)?.narrow(1, 0, length)?, 0, &mut alone)?;
        assert_eq!(bits(&prompt.narrow(0, i, 1)?.narrow(1, 0, length)?), bits(&rows));
        let row = layer.forward_cached(&token.narrow(0, i, 1)?, length, &mut alone)?;
        assert_eq!(bits(&next.narrow(0, i, 1)?), bits(&row));
    }
    assert_eq!(numbers(&prompt.narrow(0, 1, 1)?.narrow(1, 5, 7)?), [0.0; 7 * WIDTH]);
    Ok(())
}

#[test]
fn masks_and_biases_cover_the_keys_of_the_cache() -> Result<()> {
    let layer = plain_config().load(var_builder(DType::F32))?;
    let x = x(2, 9);
    let bias = tensor(3, &[2, 1, 9, 9]);
    let mask = bias_where(9, 9, 0, |row, key| key <= row).ge(0f32)?; // as a cache makes it anyway
    let whole = layer.call(&x).bias(&bias).mask(&mask).run()?;
    let mut cache = KvCache::new();
    let part = |pairs: &Tensor, first, rows, keys| {
        pairs.narrow(pairs.rank() - 2, first, rows)?.narrow(pairs.rank() - 1, 0, keys)
    };
    for (first, rows) in [(0, 6), (6, 3)] {
        let (bias, mask) =
            (part(&bias, first, rows, first + rows)?, part(&mask, first, rows, first + rows)?);
        let y = layer
            .call(&x.narrow(1, first, rows)?)
            .bias(&bias)
            .mask(&mask)
            .cache(&mut cache)
            .run()?;
        assert_eq!(bits(&y), bits(&whole.narrow(1, first, rows)?));
    }
    assert!(
        difference(&whole, &layer.call(&x).mask(&mask).run()?) > 1e-3
            && difference(&whole, &layer.call(&x).bias(&bias).run()?) > 1e-3
    );
    let wrong = sentence(layer.call(&x).bias(&bias.narrow(3, 0, 8)?).run());
    assert_eq!(
        wrong,
        "a mask or bias is [2, 1, 9, 8]; it must broadcast to [batch, heads, rows, \
        keys], [2, 6, 9, 9]"
    );
    Ok(())
}

#[test]
fn weights_rows_and_caches_have_the_types_they_are_asked_for() -> Result<()> {
    let exact = config().load(var_builder(DType::F32))?;
    let (x, expected) = (x(2, 20), exact.forward(&x(2, 20))?);
    for (dtype, kind, tolerance) in [(DType::F16, Type::F16, 2e-3), (DType::BF16, Type::Bf16, 2e-2)]
    {
        let layer = config().load(var_builder(dtype))?;
        assert_eq!(layer.layer().shape().weight_type, kind);
        assert_near(&layer.forward(&x)?, &expected, tolerance);
        let y = layer.forward(&x.to_dtype(dtype)?)?;
        assert_eq!(y.dtype(), dtype);
        assert_near(&y, &expected, 2.0 * tolerance);
        // Of a type that differs from the weights'
        assert_eq!(exact.forward(&x.to_dtype(dtype)?)?.dtype(), dtype);
    }
    for (kind, tolerance) in [(Type::Int8, 3e-2), (Type::Int4, 0.4)] {
        let layer = config().weight_type(kind).load(var_builder(DType::F32))?;
        assert_eq!(layer.layer().shape().weight_type, kind);
        let apart = difference(&layer.forward(&x)?, &expected);
        assert!(apart > 1e-5 && apart < tolerance, "{kind:?}: {apart}");
        for arithmetic in [Arithmetic::Int8, Arithmetic::Int16] {
            let integers =
                config().weight_type(kind).arithmetic(arithmetic).load(var_builder(DType::F32))?;
            assert_eq!(integers.layer().shape().arithmetic, arithmetic);
            let y = integers.forward(&x)?;
            assert!(
                difference(&y, &expected) < tolerance && bits(&y) != bits(&layer.forward(&x)?),
                "{kind:?}, {arithmetic:?}"
            );
        }
    }
    let refused = sentence(config().arithmetic(Arithmetic::Int8).load(var_builder(DType::F32)));
    assert!(refused.contains("needs integer weights, but weight_type is"), "{refused}");
    for (kind, tolerance) in [(Type::F16, 1e-3), (Type::Bf16, 1e-2), (Type::Int8, 2e-2)] {
        let mut cache = KvCache::new().k_type(kind).capacity(20);
        let apart = difference(&exact.forward_cached(&x, 0, &mut cache)?, &expected);
        assert!(apart > 1e-6 && apart < tolerance, "{kind:?}: {apart}");
    }
    Ok(())
}

#[test]
fn a_cache_of_halves_grows_without_rounding_again() -> Result<()> {
    let layer = config().load(var_builder(DType::F32))?;
    let x = x(1, 300);
    for kind in [Type::F16, Type::Bf16] {
        let (mut growing, mut large) =
            (KvCache::new().k_type(kind), KvCache::new().k_type(kind).capacity(300));
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
    let fused =
        Tensor::cat(&[&all["q_proj.weight"], &all["k_proj.weight"], &all["v_proj.weight"]], 0)?;
    let part = |first, rows, bias: Option<&str>| {
        Ok::<_, candle_core::Error>(Linear::new(
            fused.narrow(0, first, rows)?,
            bias.map(|name| all[name].clone()),
        ))
    };
    let (q, k) = (part(0, COLUMNS, Some("q_proj.bias"))?, part(COLUMNS, KV_COLUMNS, None)?);
    let v = part(COLUMNS + KV_COLUMNS, KV_COLUMNS, Some("v_proj.bias"))?;
    let o =
        // [in, out] in memory
        Linear::new(all["o_proj.weight"].t()?.contiguous()?.t()?, Some(all["o_proj.bias"].clone()));
    let layer = config().build(&Parts { q, k, v, o, q_norm: None, k_norm: None })?;
    let loaded = config().load(var_builder(DType::F32))?;
    assert_eq!(bits(&layer.forward(&x(2, 5))?), bits(&loaded.forward(&x(2, 5))?));
    Ok(())
}

#[test]
fn tables_of_the_models_own_are_the_same_rotation() -> Result<()> {
    let tables = RopeConfig::new(HEAD_DIM).tables(64).unwrap();
    let table = |numbers: &[f32]| Tensor::from_slice(numbers, (64, HEAD_DIM / 2), &Device::Cpu);
    let rope = Rope::from_tensors(&table(tables.cos())?, &table(tables.sin())?)?;
    let (theirs, ours) = (
        config().rope(&rope).load(var_builder(DType::F32))?,
        config().load(var_builder(DType::F32))?,
    );
    assert_eq!(bits(&theirs.forward(&x(1, 60))?), bits(&ours.forward(&x(1, 60))?));
    let interleaved = config().rope(&rope.interleaved()).load(var_builder(DType::F32))?;
    assert!(difference(&interleaved.forward(&x(1, 60))?, &ours.forward(&x(1, 60))?) > 1e-3);
    assert!(
        sentence(theirs.forward(&x(1, 65))).contains("64"),
        "{}",
        sentence(theirs.forward(&x(1, 65)))
    );
    assert!(sentence(Rope::from_tensors(&table(tables.cos())?, &x(1, 2)))
        .starts_with("cos is [64, 8] and sin [1, 2, 48]"));
    Ok(())
}

#[test]
fn rows_and_weights_that_mha_does_not_compute_are_refused() -> Result<()> {
    let var = Var::from_tensor(&x(1, 5))?;
    let mut cache = KvCache::new();
    let layer = config().load(var_builder(DType::F32))?;
    layer.forward_cached(&x(1, 5), 0, &mut cache)?;
    let gradient = "needs a gradient, which mha does not compute: detach() it, or load weights \
        that are no Var";
    assert_eq!(sentence(layer.forward_cached(&var, 0, &mut cache)), format!("x {gradient}"));
    assert_eq!(cache.length(), 5, "a call that is refused forgets nothing");
    let vars = weights()
        .into_iter()
        .map(|(name, weight)| (name, Var::from_tensor(&weight).unwrap().as_tensor().clone()))
        .collect();
    assert_eq!(
        sentence(config().load(VarBuilder::from_tensors(vars, DType::F32, &Device::Cpu))),
        format!("q {gradient}")
    );
    let doubles = sentence(config().load(var_builder(DType::F64)));
    assert_eq!(doubles, "q is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype");
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
    assert!(full.contains("sequence 0") && full.contains("room for 1 more, not for 2"), "{full}");
    let gap = sentence(layer.forward_cached(&token, 9, &mut cache));
    assert_eq!(
        gap,
        "offset is 9, but the cache holds 7 positions; pass as many, or fewer to \
        forget the last ones"
    );
    let batch = sentence(layer.forward_cached(&token.narrow(0, 0, 1)?, 7, &mut cache));
    assert_eq!(
        batch,
        "the cache holds 2 sequences, but the call has 1; reset() it, or pass as many"
    );
    assert_eq!(cache.length(), 7);
    assert_eq!(bits(&layer.forward_cached(&token, 7, &mut cache)?), expected);

    cache.reset();
    assert_eq!(cache.length(), 0);
    assert!(layer.forward_cached(&token.narrow(0, 0, 1)?, 0, &mut cache).is_ok()); // another batch
    assert!(layer.forward_cached(&token, 0, &mut cache).is_ok()); // and another, from the beginning
    for cache in [KvCache::new().k_type(Type::Int8), KvCache::new().v_type(Type::Int4)] {
        let growing = sentence(layer.forward_cached(&token, 0, &mut { cache }));
        assert_eq!(
            growing,
            "a cache of int8 or int4 cannot grow without rounding again; say its capacity()"
        );
    }
    Ok(())
}

#[test]
fn wrong_shapes_are_errors_with_a_sentence() {
    let layer = config().load(var_builder(DType::F32)).unwrap();
    assert_eq!(
        sentence(layer.forward(&tensor(1, &[2, 3, 40]))),
        "x is [2, 3, 40]; it must be [batch, rows, 48]"
    );
    assert_eq!(
        sentence(layer.call(&x(2, 3)).lengths(&[1]).run()),
        "q_lengths has 1 elements; [sequences 2] are 2"
    );
    let linear = |outputs: usize, inputs: usize| Linear::new(tensor(1, &[outputs, inputs]), None);
    let (q, k, o) = (linear(COLUMNS, WIDTH), linear(KV_COLUMNS, WIDTH), linear(WIDTH, COLUMNS));
    let parts = Parts { q, k: k.clone(), v: linear(31, WIDTH), o, q_norm: None, k_norm: None };
    assert_eq!(
        sentence(config().build(&parts)),
        "v is [31, 48] with the bias None; it must be [32, 48]"
    );
    let parts = Parts { v: k, ..parts };
    assert_eq!(
        sentence(config().qk_norm(1e-5).build(&parts)),
        "there is no q_norm, which qk_norm() needs"
    );
    assert!(sentence(config().num_kv_heads(5).build(&parts)).contains("it must be [80, 48]"));
    let normed = Parts { q_norm: Some(tensor(1, &[16])), k_norm: Some(tensor(1, &[8])), ..parts };
    assert_eq!(
        sentence(config().build(&normed)),
        "there is a q_norm, but no epsilon for it: set qk_norm()"
    );
    assert_eq!(sentence(config().qk_norm(1e-5).build(&normed)), "k_norm is [8]; it must be [16]");
    assert!(config().load_named(var_builder(DType::F32), &Names::bert()).is_err());
}
