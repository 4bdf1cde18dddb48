use mha::{
    alibi_slopes, t5_relative_bias, Attention, CacheConfig, Elements, ErrorKind, KvCache, ScoreColumns, ScoreOptions, Taps, Workspace,
};

use crate::support::{assert_near, bits, error_of, layer, numbers};

const BATCH: usize = 2;
const HEADS: usize = 2;
const ROWS: usize = 5;
const PAIRS: usize = BATCH * HEADS * ROWS * ROWS;

/// What attention of two sequences and two heads gives, five rows to five keys.
struct Results {
    output: Vec<f32>,
    weights: Vec<f32>,
    lse: Vec<f32>,
    scaled: Vec<f32>,
    softcapped: Vec<f32>,
    masked: Vec<f32>,
}

impl Results {
    fn bits(&self) -> [Vec<u32>; 3] {
        [&self.output, &self.weights, &self.lse].map(|values| bits(values))
    }
}

fn attend(is_causal: bool, options: ScoreOptions<'_>) -> Results {
    let [q, k, v] = [1, 2, 3].map(|seed| numbers(BATCH * ROWS * HEADS * 4, seed));
    let pairs = || vec![f32::NAN; PAIRS];
    let mut lse = vec![f32::NAN; BATCH * HEADS * ROWS];
    let (mut output, mut weights, mut scaled, mut softcapped, mut masked) = (vec![f32::NAN; q.len()], pairs(), pairs(), pairs(), pairs());
    let taps = Taps::new().scaled_scores(&mut scaled).softcapped_scores(&mut softcapped).masked_scores(&mut masked);
    let call = Attention::new(HEADS, 4).scale(2.0).call(&q, &mut output).batch(BATCH).key_value(&k, &v).score(options);
    let call = if is_causal { call.causal() } else { call };
    call.attention_weights(&mut weights).lse(&mut lse).taps(taps).run(&mut Workspace::new()).unwrap();
    Results { output, weights, lse, scaled, softcapped, masked }
}

fn plain() -> Results {
    attend(false, ScoreOptions::new())
}

/// 1 up to the diagonal.
fn triangle() -> Vec<u8> {
    (0..ROWS * ROWS).map(|pair| u8::from(pair % ROWS <= pair / ROWS)).collect()
}

/// Sequence, head, row and key of each pair.
fn pairs() -> impl Iterator<Item = [usize; 4]> {
    (0..PAIRS).map(|pair| [pair / ROWS / ROWS / HEADS, pair / ROWS / ROWS % HEADS, pair / ROWS % ROWS, pair % ROWS])
}

#[test]
fn a_head_of_scale_zero_has_the_outputs_of_padding() {
    let (plain, scaled) = (plain(), attend(false, ScoreOptions::new().head_scales(&[0.0, -2.0])));
    for (i, value) in scaled.output.iter().enumerate() {
        let head = i / 4 % HEADS;
        assert_eq!(*value, if head == 0 { 0.0 } else { plain.output[i] * -2.0 });
    }
    assert!(scaled.lse.chunks(ROWS).step_by(HEADS).all(|rows| rows.iter().all(|lse| *lse == f32::NEG_INFINITY)));
    let q = numbers(HEADS * 4, 1);
    let short = ScoreOptions::new().head_scales(&[1.0]);
    let call = |y: &mut [f32]| {
        error_of(Attention::new(HEADS, 4).call(&q, y).key_value(&q, &q).score(short).run(&mut Workspace::new()), ErrorKind::SliceLength)
    };
    assert_eq!(call(&mut [0.0; HEADS * 4]), "head_scales has 1 elements; [num_heads 2] are 2");
}

#[test]
fn a_mask_of_a_triangle_is_causal() {
    let expected = attend(true, ScoreOptions::new());
    let masked = attend(false, ScoreOptions::new().mask(&triangle(), [1, 1, ROWS, ROWS]));
    assert_eq!(masked.bits(), expected.bits());
    assert_eq!(bits(&masked.masked), bits(&expected.masked));
    assert_ne!(masked.bits(), plain().bits());
}

#[test]
fn extents_of_1_are_the_same_for_all_sequences_heads_and_rows() {
    let extents = [BATCH, HEADS, ROWS, ROWS];
    for shared in 0..8 {
        let shape = [0, 1, 2, 3].map(|axis| if shared >> axis & 1 == 1 { 1 } else { extents[axis] });
        let [batch, heads, rows, columns] = shape;
        let bias = numbers(batch * heads * rows * columns, 7);
        let mask: Vec<u8> = bias.iter().map(|value| if *value > -0.5 { 200 } else { 0 }).collect();
        let element =
            |[b, head, i, j]: [usize; 4]| ((b.min(batch - 1) * heads + head.min(heads - 1)) * rows + i.min(rows - 1)) * columns + j;
        let whole_bias: Vec<f32> = pairs().map(|pair| bias[element(pair)]).collect();
        let whole_mask: Vec<u8> = pairs().map(|pair| mask[element(pair)]).collect();
        let given = attend(false, ScoreOptions::new().bias(&bias, shape).mask(&mask, shape));
        let whole = attend(false, ScoreOptions::new().bias(&whole_bias, extents).mask(&whole_mask, extents));
        assert_eq!(given.bits(), whole.bits(), "{shape:?}");
        assert!(given.weights.iter().zip(&whole_mask).all(|(weight, mask)| (*weight == 0.0) == (*mask == 0)), "{shape:?}");
    }
}

#[test]
fn a_softcap_bounds_scores_and_a_large_one_hardly_changes_them() {
    let large = attend(false, ScoreOptions::new().softcap(1e4));
    assert_near(&large.output, &plain().output, 1e-5);
    let small = attend(false, ScoreOptions::new().softcap(0.5));
    assert!(small.scaled.iter().any(|score| score.abs() > 0.5));
    let by_hand: Vec<f32> = small.scaled.iter().map(|score| 0.5 * (score / 0.5).tanh()).collect();
    assert_near(&small.softcapped, &by_hand, 1e-6);
    assert_eq!(bits(&small.masked), bits(&small.softcapped));
    assert_eq!(bits(&plain().softcapped), bits(&plain().scaled));
}

#[test]
fn sinks_take_their_share_of_the_weights_of_each_row() {
    let (sinks, without) = ([1.5, f32::NEG_INFINITY], plain()); // of the second head none
    let with = attend(false, ScoreOptions::new().sinks(&sinks));
    for (row, (weights, scores)) in with.weights.chunks(ROWS).zip(without.masked.chunks(ROWS)).enumerate() {
        let of_keys: f32 = scores.iter().map(|score| score.exp()).sum();
        let of_all = of_keys + sinks[row / ROWS % HEADS].exp();
        assert_near(&[weights.iter().sum(), with.lse[row]], &[of_keys / of_all, of_all.ln()], 1e-6);
    }
    assert!(with.weights[..ROWS].iter().sum::<f32>() < 0.9);
    let masked = attend(false, ScoreOptions::new().sinks(&sinks).mask(&[0; ROWS], [1, 1, 1, ROWS]));
    assert!(masked.output.iter().chain(&masked.weights).all(|value| *value == 0.0));
    assert!(masked.lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
}

#[test]
fn alibi_lowers_scores_by_the_distance() {
    let slopes = alibi_slopes(HEADS).unwrap();
    assert_eq!(slopes, [1.0 / 16.0, 1.0 / 256.0]);
    let bias: Vec<f32> = pairs().map(|[_, head, i, j]| -slopes[head] * i.abs_diff(j) as f32).collect();
    let by_hand = attend(false, ScoreOptions::new().bias(&bias, [BATCH, HEADS, ROWS, ROWS]));
    let with = attend(false, ScoreOptions::new().alibi_slopes(&slopes));
    assert_near(&with.masked, &by_hand.masked, 1e-6);
    assert_near(&with.output, &by_hand.output, 1e-6);
    let shifted: Vec<f32> = with.scaled.iter().zip(&bias).map(|(score, bias)| score + bias).collect();
    assert_near(&with.masked, &shifted, 1e-6);
}

#[test]
fn a_relative_bias_is_that_of_the_distances() {
    let table = [0.5, -1.0, 0.25, 2.0, 3.0, -0.5]; // two heads; distances of -1, 0, 1
    let bias: Vec<f32> = pairs().map(|[_, head, i, j]| table[3 * head + (j + 1).saturating_sub(i).min(2)]).collect();
    let by_hand = attend(false, ScoreOptions::new().bias(&bias, [BATCH, HEADS, ROWS, ROWS]));
    let with = attend(false, ScoreOptions::new().relative_bias(&table, 1, 1));
    assert_eq!(with.bits(), by_hand.bits());
}

#[test]
fn scales_of_queries_scale_scores() {
    let plain = attend(false, ScoreOptions::new());
    let of_all: Vec<f32> = (0..ROWS).map(|i| 2f32.powi(i as i32 - 2)).collect();
    let of_each = of_all.repeat(BATCH);
    let with = attend(false, ScoreOptions::new().q_scales(&of_all, [1, ROWS]));
    assert_eq!(with.bits(), attend(false, ScoreOptions::new().q_scales(&of_each, [BATCH, ROWS])).bits());
    let scaled: Vec<f32> = plain
        .scaled
        .chunks(ROWS)
        .enumerate()
        .flat_map(|(row, s)| s.iter().map(move |s| (row, *s)))
        .map(|(row, s)| s * of_all[row % ROWS])
        .collect();
    assert_eq!(bits(&with.scaled), bits(&scaled));
}

#[test]
fn relative_biases_of_t5_are_those_of_its_buckets() {
    let embedding: Vec<f32> = (0..64).map(|n| n as f32).collect();
    let both = t5_relative_bias(&embedding, 2, 128, true, 200, 200).unwrap();
    assert_eq!([both[0], both[200 - 90], both[200], both[201], both[400], both[401 + 200 - 8]], [30.0, 28.0, 0.0, 34.0, 62.0, 17.0]);
    let left = t5_relative_bias(&embedding, 2, 128, false, 128, 0).unwrap();
    assert_eq!([left[0], left[128 - 15], left[128]], [62.0, 30.0, 0.0]);
    error_of(t5_relative_bias(&embedding, 2, 8, true, 1, 1), ErrorKind::InvalidValue);
    error_of(t5_relative_bias(&embedding, 3, 128, true, 1, 1), ErrorKind::SliceLength);
    error_of(t5_relative_bias(&embedding, 2, 0, true, 1, 1), ErrorKind::InvalidValue);
    error_of(t5_relative_bias(&embedding, 2, 128, true, usize::MAX, 1), ErrorKind::OutOfMemory);
}

#[test]
fn slopes_are_as_many_as_there_are_heads() {
    assert_eq!(alibi_slopes(8).unwrap(), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
    assert_eq!(error_of(alibi_slopes(0), ErrorKind::InvalidValue), "num_heads is 0; it must be 1 to 2147483647");
    error_of(alibi_slopes(usize::MAX), ErrorKind::OutOfMemory);
}

#[test]
fn a_bias_is_added_as_floats_or_halves_and_minus_infinity_masks() {
    let (floats, halves) = ([0.0, 1.0, -2.0, 0.5, -3.0], [0x0000u16, 0x3c00, 0xc000, 0x3800, 0xc200]);
    let of_floats = attend(false, ScoreOptions::new().bias(&floats, [1, 1, 1, ROWS]));
    let of_halves = attend(false, ScoreOptions::new().bias(Elements::F16(&halves), [1, 1, 1, ROWS]));
    assert_eq!(of_halves.bits(), of_floats.bits());
    let sums: Vec<f32> = of_floats.scaled.iter().zip(floats.iter().cycle()).map(|(score, bias)| score + bias).collect();
    assert_near(&of_floats.masked, &sums, 1e-6);

    let bias: Vec<f32> = triangle().iter().map(|mask| if *mask == 0 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let masked = attend(false, ScoreOptions::new().bias(&bias, [1, 1, ROWS, ROWS]));
    assert_eq!(masked.bits(), attend(true, ScoreOptions::new()).bits());

    let (q, mut output) = (numbers(4, 1), [7.0; 4]);
    let call = Attention::new(1, 4).call(&q, &mut output).key_value(&q, &q);
    let sentence =
        error_of(call.score(ScoreOptions::new().bias(Elements::Bf16(&[0]), [1; 4])).run(&mut Workspace::new()), ErrorKind::InvalidValue);
    assert!(sentence.starts_with("score.bias_type is 2"), "{sentence}");
}

const TEXT: usize = 6;
const DRAFTS: usize = 3;
/// Two guesses at what follows the first draft.
const TREE: [u8; DRAFTS * DRAFTS] = [1, 0, 0, 1, 1, 0, 1, 0, 1];

/// The output of drafts behind a text that is in a cache already.
fn drafts(config: &CacheConfig, window: usize, options: ScoreOptions<'_>) -> Vec<u32> {
    let (layer, x, mut workspace) = (layer(), numbers((TEXT + DRAFTS) * 32, 4), Workspace::new());
    let (mut text, mut y) = (vec![0.0; TEXT * 32], vec![f32::NAN; DRAFTS * 32]);
    let mut cache = KvCache::new(config).unwrap();
    layer.forward(&x[..TEXT * 32], &mut text).causal().window_left(window).cache(&mut cache).run(&mut workspace).unwrap();
    let call = layer.forward(&x[TEXT * 32..], &mut y).causal().window_left(window).cache(&mut cache);
    call.score(options).run(&mut workspace).unwrap();
    bits(&y)
}

#[test]
fn a_tree_of_drafts_behind_a_cache_has_columns_for_the_new_keys_or_for_all() {
    let config = CacheConfig::for_layer(layer().shape(), 32);
    let new = ScoreOptions::new().mask(&TREE, [1, 1, DRAFTS, DRAFTS]).columns(ScoreColumns::NewKeys);
    let of_new = drafts(&config, TEXT + DRAFTS, new);
    // As wide as the cache; what is beyond the keys does not count.
    let wide: Vec<u8> = TREE.chunks(DRAFTS).flat_map(|row| [&[1; TEXT], row, &[0; 32 - TEXT - DRAFTS]].concat()).collect();
    let all = ScoreOptions::new().mask(&wide, [1, 1, DRAFTS, 32]);
    assert_eq!(drafts(&config, TEXT + DRAFTS, all), of_new);
    assert_ne!(drafts(&config, TEXT + DRAFTS, ScoreOptions::new()), of_new);

    // The second guess alone, as if there were no first one.
    let with_bias = [0.0, f32::NEG_INFINITY, 0.0];
    let bias = ScoreOptions::new().bias(&with_bias, [1, 1, 1, DRAFTS]).columns(ScoreColumns::NewKeys);
    assert_eq!(drafts(&config, TEXT + DRAFTS, bias)[2 * 32..], of_new[2 * 32..]);
}

#[test]
fn a_ring_takes_columns_of_new_keys_only() {
    let (layer, config, x) = (layer(), CacheConfig::for_layer(layer().shape(), 32), numbers(2 * 16, 5));
    let new = ScoreOptions::new().mask(&TREE, [1, 1, DRAFTS, DRAFTS]).columns(ScoreColumns::NewKeys);
    assert_eq!(drafts(&config.ring(), 4, new), drafts(&config, 4, new));
    let (mut ring, mut y) = (KvCache::new(&config.ring()).unwrap(), [7.0; 32]);
    ring.append(0, &x, &x).unwrap();
    let call = layer.forward(&x, &mut y).causal().window_left(4).cache(&mut ring);
    let sentence = error_of(call.score(ScoreOptions::new().mask(&[1], [1; 4])).run(&mut Workspace::new()), ErrorKind::InvalidValue);
    assert!(sentence.contains("ring") && sentence.contains("MHA_COLUMNS_NEW_KEYS"), "{sentence}");
    assert_eq!((y, ring.length(0).unwrap()), ([7.0; 32], 2));
}
