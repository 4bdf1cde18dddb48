//! Calls with anything in them. Most have something wrong; under valgrind
//! (tools/bindings/rust/test.sh), none may touch memory that is not theirs.

use mha::{
    AlignedBuffer, Attention, CacheConfig, CacheKind, ContextNorm, Elements, ErrorKind, Gate,
    KvCache, Layer, LayerConfig, Matrix, Norm, Outputs, Rope, RopeConfig, ScoreColumns,
    ScoreOptions, Segments, Strides, Type, WeightLayout, Weights, Workspace,
};

use crate::support::numbers;

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Mostly `count`, else one less or more.
    fn about(&mut self, count: usize) -> usize {
        match self.below(25) {
            0 => count.saturating_sub(1),
            1 => count + 1,
            _ => count,
        }
    }

    fn array(&mut self, count: usize) -> Vec<f32> {
        numbers(self.about(count), count as u32)
    }

    /// Lengths or positions of each sequence.
    fn list(&mut self, batch: usize, most: usize) -> Vec<i64> {
        let count = self.about(batch);
        (0..count).map(|_| self.below(most + 2) as i64 - i64::from(self.one_in(20))).collect()
    }

    /// Extents of a mask or bias, and a count of elements.
    fn extents(
        &mut self, batch: usize, heads: usize, n_q: usize, columns: usize,
    ) -> ([usize; 4], usize) {
        let shared =
            [batch, heads, n_q].map(|extent| if self.one_in(2) { 1 } else { self.about(extent) });
        let extents = [shared[0], shared[1], shared[2], self.about(columns)];
        (extents, self.about(extents.iter().product()))
    }

    fn layer(&mut self) -> mha::Result<Layer<'static>> {
        let kv_heads = 1 + self.below(2);
        let heads = kv_heads * (1 + self.below(2));
        let (query_dim, head_dim, head_dim_v) =
            (2 + self.below(20), 2 * (1 + self.below(5)), 1 + self.below(6));
        let key_dim = if self.one_in(4) { 1 + self.below(9) } else { query_dim };
        let config = LayerConfig::new(query_dim, heads)
            .key_dim(key_dim)
            .num_kv_heads(kv_heads)
            .weight_type(Type::ALL[self.below(Type::ALL.len())]);
        let mut config = config.head_dim(head_dim).head_dim_v(head_dim_v);
        let (has_gate, in_q) = (self.one_in(3), self.one_in(2));
        let gate_dim = if self.one_in(2) { 1 } else { head_dim_v };
        if has_gate {
            config = config
                .gate(if self.one_in(2) { Gate::Sigmoid } else { Gate::Softplus })
                .gate_dim(gate_dim);
        }
        let q_width = head_dim + if has_gate && in_q { gate_dim } else { 0 };
        let (w_g, b_g) = (self.array(query_dim * heads * gate_dim), self.array(heads * gate_dim));
        let b_q = self.array(heads * q_width);
        let (w_q, w_k) =
            (self.array(query_dim * heads * q_width), self.array(key_dim * kv_heads * head_dim));
        let (w_v, w_o) = (
            self.array(key_dim * kv_heads * head_dim_v),
            self.array(heads * head_dim_v * query_dim),
        );
        let mut weights = Weights::new(&w_q, &w_k, &w_v).output(&w_o);
        if self.one_in(4) {
            weights = weights.query_bias(&b_q);
        }
        if has_gate && in_q {
            weights = weights.gate_in_query();
        } else if has_gate {
            weights = weights.gate(&w_g);
            if self.one_in(2) {
                weights = weights.gate_bias(&b_g);
            }
        }
        let weights =
            weights.layout(if self.one_in(2) { WeightLayout::InOut } else { WeightLayout::OutIn });
        Layer::new(&config, &weights)
    }

    fn cache(&mut self, config: CacheConfig) -> mha::Result<KvCache> {
        let sequences = 1 + self.below(4);
        let config = config
            .num_sequences(sequences)
            .k_type([Type::F32, Type::Int8][self.below(2)])
            .v_type([Type::F32, Type::Int4][self.below(2)]);
        match self.below(3) {
            0 => KvCache::new(&config),
            1 => KvCache::new(&config.kind(CacheKind::Ring)),
            _ => {
                let mut cache = KvCache::new(
                    &config.kind(CacheKind::Paged { block_positions: 16, num_blocks: 3 }),
                )?;
                for sequence in 0..self.below(sequences + 1) {
                    cache.set_blocks(sequence, &[sequence as i32])?;
                }
                Ok(cache)
            }
        }
    }
}

/// Sets the options that both kinds of calls have.
macro_rules! options {
    (
        $call:ident, $dice:ident, $set:ident, $cache:ident, $rope:ident, $norm:ident, $score:ident,
        $lists:ident, $outputs:ident
    ) => {{
        let [lse, weights, scores, context] = &mut $outputs;
        let mut call = $call;
        let is_set = |bit: u32| $set >> bit & 1 == 1;
        call = if is_set(0) { call.causal() } else { call };
        call = if is_set(1) { call.window_left($dice.below(9)) } else { call };
        call = if is_set(2) { call.window_right($dice.below(9)) } else { call };
        call = if is_set(3) { call.q_lengths(&$lists[0]) } else { call };
        call = if is_set(4) { call.kv_lengths(&$lists[1]) } else { call };
        call = if is_set(5) { call.q_first_positions(&$lists[2]) } else { call };
        call = if is_set(6) { call.q_first_rows(&$lists[4]) } else { call };
        call = if is_set(14) { call.kv_first_rows(&$lists[5]) } else { call };
        call = if is_set(15) && is_set(7) {
            call.rope_q_positions(&$lists[6]).rope_k_positions(&$lists[7])
        } else {
            call
        };
        call = if is_set(7) { call.rope($rope) } else { call };
        call = if is_set(8) { call.lse(lse) } else { call };
        call = if is_set(9) { call.attention_weights(weights) } else { call };
        call = if is_set(10) {
            call.outputs(Outputs::new().scores(scores).context(context))
        } else {
            call
        };
        call = if is_set(11) && $cache.is_some() { call.cache_sequences(&$lists[3]) } else { call };
        call = if is_set(12) { call.score($score) } else { call };
        call = if is_set(13) { call.norm($norm) } else { call };
        if let Some(cache) = &mut $cache {
            call = if $dice.one_in(4) { call.cache_read(cache) } else { call.cache(cache) };
        }
        call
    }};
}

#[test]
fn calls_with_anything_in_them_stay_within_their_slices() {
    let (mut dice, mut workspace, mut succeeded, mut kinds) =
        (Dice(3), Workspace::new(), [0; 4], Vec::new());
    for _ in 0..3000 {
        let Ok(layer) = dice.layer() else { continue };
        let shape = *layer.shape();
        let (batch, n_q, n_kv) = (dice.below(4), dice.below(6), dice.below(8));
        // Few options at a time, or hardly any call would do.
        let set = (0..16).filter(|_| dice.one_in(5)).fold(0, |set, bit| set | 1 << bit);
        let has_cache = dice.one_in(2);
        let mut cache =
            if has_cache { dice.cache(CacheConfig::for_layer(&shape, 16)).ok() } else { None };
        let held = dice.below(8);
        if let Some(cache) = &mut cache {
            let row = shape.num_kv_heads * held;
            let _ = cache.append(
                0,
                &dice.array(row * shape.head_dim),
                &dice.array(row * shape.head_dim_v),
            );
        }
        let rope_dims = shape.head_dim - if dice.one_in(5) { 2 } else { 0 };
        let tables = RopeConfig::new(rope_dims.max(2)).tables(1 + dice.below(20)).unwrap();
        let rope = &tables;
        let is_new = has_cache && dice.one_in(2);
        let columns = if has_cache && !is_new { held + n_q.max(n_kv) } else { n_q.max(n_kv) };
        let (bias_extents, bias_len) = dice.extents(batch, shape.num_heads, n_q, columns);
        let (mask_extents, mask_len) = dice.extents(batch, shape.num_heads, n_q, columns);
        let (bias, halves, mask) = (vec![0.5; bias_len], vec![0x3800; bias_len], vec![1; mask_len]);
        let (slopes, sinks) = (dice.array(shape.num_heads), dice.array(shape.num_heads));
        let mut score = ScoreOptions::new().softcap(dice.below(3) as f32).mask(&mask, mask_extents);
        if dice.one_in(2) {
            score = score.bias(
                if dice.one_in(2) { Elements::F32(&bias) } else { Elements::F16(&halves) },
                bias_extents,
            );
        }
        if dice.one_in(4) {
            score = score.alibi_slopes(&slopes).sinks(&sinks);
        }
        if is_new {
            score = score.column_keys(ScoreColumns::NewKeys);
        }
        let (all_heads, shorter) = (dice.one_in(2), usize::from(dice.one_in(8)));
        let heads = if all_heads { [shape.num_heads, shape.num_kv_heads] } else { [1, 1] };
        let weights =
            heads.map(|heads| dice.array((heads * shape.head_dim).saturating_sub(shorter)));
        let mut norm =
            if dice.one_in(2) { Norm::rms(1e-6) } else { Norm::layer(1e-6).q_bias(&weights[0]) };
        norm = norm.q_weight(&weights[0]).k_weight(&weights[1]).values();
        if all_heads {
            norm = norm.all_heads();
        }
        let lists =
            [(1, n_q), (1, n_kv), (1, n_kv), (1, 4), (1, n_q), (1, n_kv), (n_q, 8), (n_kv, 8)];
        let lists = lists.map(|(rows, most)| dice.list(batch * rows, most));
        let pairs = batch * shape.num_heads * n_q * if has_cache { held + n_kv } else { n_kv };
        let sizes = [
            batch * shape.num_heads * n_q,
            pairs,
            pairs,
            batch * n_q * shape.num_heads * shape.head_dim_v,
        ];
        let mut outputs = sizes.map(|size| dice.array(size));

        let kind = dice.below(2);
        let result = if kind == 0 {
            let (query, key) = (
                dice.array(batch * n_q * shape.query_dim),
                dice.array(batch * n_kv * shape.key_dim),
            );
            let mut y = dice.array(batch * n_q * shape.output_dim);
            let call = layer.forward(&query, &mut y).batch(batch);
            let mut call = options!(call, dice, set, cache, rope, norm, score, lists, outputs);
            if dice.one_in(2) {
                call = call.key(&key);
            }
            if dice.one_in(20) {
                call = call.n_q(n_q).query_strides(0, shape.query_dim + dice.below(2));
            }
            if dice.one_in(20) {
                call = call.output_strides(0, shape.output_dim + dice.below(2));
            }
            call.run(&mut workspace)
        } else {
            let attention = Attention::new(shape.num_heads, shape.head_dim)
                .num_kv_heads(shape.num_kv_heads)
                .head_dim_v(shape.head_dim_v);
            let (q_row, k_row) =
                (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
            let (q, k) = (dice.array(batch * n_q * q_row), dice.array(batch * n_kv * k_row));
            let v = dice.array(batch * n_kv * shape.num_kv_heads * shape.head_dim_v);
            let mut output = dice.array(batch * n_q * shape.num_heads * shape.head_dim_v);
            let call = attention.call(&q, &mut output).batch(batch);
            let mut call = options!(call, dice, set, cache, rope, norm, score, lists, outputs);
            if !dice.one_in(4) {
                call = call.key_value(&k, &v);
            }
            if dice.one_in(10) {
                call = call.n_kv(n_kv).k_strides(Strides::heads_first(
                    shape.num_kv_heads,
                    n_kv,
                    shape.head_dim,
                ));
            }
            call.run(&mut workspace)
        };
        match result {
            Ok(()) => succeeded[kind + if cache.is_some() { 2 } else { 0 }] += 1,
            Err(error) => kinds.push(error.kind()),
        }
    }
    // Of layers and of attention alone, without a cache and with one.
    assert!(
        succeeded.iter().all(|count| *count > 50),
        "of {} calls, {succeeded:?} succeeded: too few to show anything",
        kinds.len()
    );
    for kind in [ErrorKind::SliceLength, ErrorKind::InvalidValue, ErrorKind::Shape] {
        assert!(kinds.contains(&kind), "{kind:?}");
    }
}

impl Dice {
    /// Mostly small; else so large that sums and products of it overflow, and that no machine has
    /// so much memory.
    fn any(&mut self) -> usize {
        const LARGE: [usize; 9] = [
            1 << 46,
            1 << 62,
            1 << 63,
            usize::MAX,
            usize::MAX - 1,
            usize::MAX / 2,
            usize::MAX / 3,
            usize::MAX / 4,
            (1 << 63) - 1,
        ];
        if self.one_in(6) {
            LARGE[self.below(LARGE.len())]
        } else {
            self.below(9)
        }
    }

    fn anys<const N: usize>(&mut self) -> [usize; N] {
        [0; N].map(|_| self.any())
    }

    fn ints(&mut self) -> Vec<i64> {
        (0..self.below(5))
            .map(|_| (self.any() as i64).wrapping_mul(if self.one_in(8) { -1 } else { 1 }))
            .collect()
    }

    fn strides(&mut self) -> Strides {
        let [batch, row, head] = self.anys();
        if self.one_in(2) {
            Strides { batch, row, head }
        } else {
            Strides::heads_first(batch, row, head)
        }
    }
}

/// Integers as wrong as they can be: with checks for overflow, as tests are built, none may panic.
#[test]
fn extents_strides_and_lengths_of_any_size_are_refused_or_work() {
    let (mut dice, mut workspace, mut done, count) = (Dice(5), Workspace::new(), 0, 6000);
    let packed =
        Layer::pack(&LayerConfig::new(4, 2), &Weights::fused(&[0.25; 48]).output(&[0.5; 16]))
            .unwrap();
    let layer = Layer::from_packed(packed.to_vec())
        .or_else(|_| Layer::from_packed(AlignedBuffer::copy_of(&packed).unwrap()))
        .unwrap();
    for case in 0..count {
        let [a, b, c, d, e, f, g, h] = dice.anys();
        let (x, y, z) = (dice.array(b.min(9) * c.min(9)), dice.array(d.min(9)), dice.array(16));
        let (mut to, mut chosen, ints, lists) =
            (dice.array(a.min(9) * b.min(9)), vec![0; e.min(9)], dice.ints(), dice.ints());
        let (mut bytes, flipped) = (packed.to_vec(), dice.below(packed.len()));
        let small: Vec<i32> = ints.iter().map(|number| *number as i32).collect();
        let attention =
            Attention::new(a, b).num_kv_heads(if dice.one_in(2) { a } else { c }).head_dim_v(d);
        let mut cache = KvCache::new(&CacheConfig::new(16, 2, 2).num_sequences(2)).unwrap();
        let score = ScoreOptions::new()
            .q_scales(&y)
            .relative_rows(&x, [a, b, c, d], e)
            .chosen_keys(&small, [e, f, g, h], d);
        let score = if dice.one_in(2) {
            score
        } else {
            ScoreOptions::new().relative_bias(&x, e, f).num_columns(g).segments(
                Segments::Within,
                &small,
                None,
            )
        };
        let rope = &Rope::new(a, &x, &x).table_stride(b).offset(c);
        let context = ContextNorm::rms(1e-5).weight(&y).bias(&z);
        let result = match case % 18 {
            0 => {
                let config = LayerConfig::new(a, b)
                    .key_dim(c)
                    .head_dim(d)
                    .head_dim_v(e)
                    .num_kv_heads(f)
                    .output_dim(g);
                let matrix = |data, stride| Matrix::f32(data).stride(stride);
                let weights = Weights::new(matrix(&x, h), matrix(&x, 0), matrix(&y, c))
                    .output(matrix(&z, d))
                    .query_bias(&y);
                Layer::new(&config, &weights).and_then(|_| Layer::pack(&config, &weights)).map(drop)
            }
            1 => Layer::new(
                &LayerConfig::linear(a, b),
                &Weights::linear(Matrix::int8(&[1; 64][..(c.min(64))], &y).stride(d)),
            )
            .map(drop),
            2 => KvCache::new(
                &CacheConfig::new(a, b, c)
                    .num_sequences(d)
                    .head_dim_v(e)
                    .kind(CacheKind::Paged { block_positions: f, num_blocks: g }),
            )
            .map(drop),
            3 => KvCache::new(&if dice.one_in(2) {
                CacheConfig::new(16, b, c).kind(CacheKind::Ring)
            } else {
                CacheConfig::new(a, b, c)
            })
            .map(drop),
            4 => cache
                .append(a, &z, &z)
                .and_then(|()| cache.truncate(b, c))
                .and_then(|()| cache.copy_prefix(d, e, f)),
            5 => cache
                .append(0, &[1.0; 16], &[1.0; 16])
                .and_then(|()| cache.read(a, b..c, Some(&mut to), None)),
            6 => cache
                .set_blocks(a, &small)
                .and_then(|()| cache.unshare(b, c as i32))
                .and_then(|_| cache.length(b).map(drop)),
            7 => RopeConfig::new(a).linear(d as f64).dynamic_ntk(2.0, e, f).tables(b).map(drop),
            8 => RopeConfig::new(a).mrope([b, c, d], &ints, true).fill(
                e,
                f,
                &mut to,
                &mut chosen.iter().map(|_| 0.0).collect::<Vec<_>>(),
            ),
            9 => mha::alibi_slopes(a)
                .and_then(|_| mha::t5_relative_bias(&x, b, c, dice.one_in(2), d, e))
                .map(drop),
            10 => mha::partials_merge(a, &mut to, &x).and_then(|()| {
                attention.finish_partials(c, &x, Some(&y), None, &mut to, &mut z.clone())
            }),
            11 => {
                bytes[flipped] ^= 1 << dice.below(8);
                bytes.truncate(if dice.one_in(4) { flipped } else { bytes.len() });
                let damaged = AlignedBuffer::copy_of(&bytes).unwrap();
                assert!(Layer::verify(&damaged).is_err());
                Layer::from_packed(damaged)
                    .and_then(|layer| layer.forward(&z, &mut [0.0; 16]).run(&mut workspace))
            }
            12 => {
                let mut saved = AlignedBuffer::copy_of(cache.as_bytes()).unwrap();
                let at = dice.below(saved.len().min(400));
                saved[at] ^= 1 << dice.below(8);
                KvCache::copy_of(&saved)
                    .and_then(|mut cache| {
                        cache.append(1, &[1.0; 4], &[1.0; 4]).and_then(|()| cache.try_clone())
                    })
                    .map(drop)
            }
            13 => AlignedBuffer::zeroed(a | 1 << 46).map(drop).or(workspace.reserve(b | 1 << 46)),
            14 => {
                let call = attention
                    .call(&x, &mut to)
                    .batch(e)
                    .n_q(f)
                    .n_kv(g)
                    .q_strides(dice.strides())
                    .k_strides(dice.strides())
                    .key_value(&y, &z);
                let call = if dice.one_in(2) {
                    call.score(score)
                } else {
                    call.window_left(h).kv_first_position(c)
                };
                let call = if dice.one_in(2) {
                    call.rope(rope).rope_q_positions(&ints).norm(Norm::of_context(context))
                } else {
                    call.cache(&mut cache).cache_sequences(&lists)
                };
                call.info().and_then(|_| call.run(&mut workspace))
            }
            16 => {
                let (keys, mut output) = ([0.5; 12], [0.0; 12]); // sound but for one option
                let call = Attention::new(1, 4).call(&keys, &mut output).key_value(&keys, &keys);
                let call = match dice.below(3) {
                    0 => call.rope(rope).rope_q_positions(&ints),
                    1 => call.score(score),
                    _ => call.norm(Norm::of_context(context)),
                };
                call.run(&mut workspace)
            }
            15 => {
                let call = attention
                    .head_dim_v(0)
                    .choose_keys(&x, &y, c, &mut chosen)
                    .key(&z)
                    .batch(d)
                    .n_q(e)
                    .q_lengths(&ints)
                    .index_scores(&mut to);
                call.workspace_bytes().and_then(|_| call.run(&mut workspace))
            }
            _ => {
                let call = layer
                    .forward(&x, &mut to)
                    .batch(a)
                    .n_q(b)
                    .query_strides(c, d)
                    .output_strides(e, f)
                    .cu_seqlens_q(&ints);
                let call = if dice.one_in(2) {
                    call.key(&y).key_strides(g, h).cu_seqlens_kv(&lists)
                } else {
                    call.q_first_positions(&lists).score(score)
                };
                call.info().and_then(|_| call.run(&mut workspace)).or(layer
                    .linear(&x, &mut to)
                    .residual(&y)
                    .strides(a, b, c, d)
                    .run(&mut workspace))
            }
        };
        done += usize::from(result.is_ok());
    }
    assert!(
        (200..count - 200).contains(&done),
        "{done} of {count} worked: too few or too many to show anything"
    );
}
