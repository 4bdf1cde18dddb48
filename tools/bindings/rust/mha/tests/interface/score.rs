use mha::{
    alibi_slopes, t5_relative_bias, Attention, CacheConfig, CacheKind, Elements, ErrorKind,
    KvCache, Outputs, ScoreOptions,
};

use crate::support::{assert_near, bits, error_of, layer, numbers, Alone};

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
    let (mut output, mut weights, mut scaled, mut softcapped, mut masked) =
        (vec![f32::NAN; q.len()], pairs(), pairs(), pairs(), pairs());
    let outputs = Outputs::new()
        .scaled_scores(&mut scaled)
        .softcapped_scores(&mut softcapped)
        .masked_scores(&mut masked);
    let call = Attention::new(HEADS, 4)
        .scale(2.0)
        .call(&q, &mut output)
        .batch(BATCH)
        .key_value(&k, &v)
        .score(options);
    let call = if is_causal { call.causal() } else { call };
    call.attention_weights(&mut weights).lse(&mut lse).outputs(outputs).done();
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
    (0..PAIRS).map(|pair| {
        [pair / ROWS / ROWS / HEADS, pair / ROWS / ROWS % HEADS, pair / ROWS % ROWS, pair % ROWS]
    })
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
        let shape =
            [0, 1, 2, 3].map(|axis| if shared >> axis & 1 == 1 { 1 } else { extents[axis] });
        let [batch, heads, rows, columns] = shape;
        let bias = numbers(batch * heads * rows * columns, 7);
        let mask: Vec<u8> = bias.iter().map(|value| if *value > -0.5 { 200 } else { 0 }).collect();
        let element = |[b, head, i, j]: [usize; 4]| {
            ((b.min(batch - 1) * heads + head.min(heads - 1)) * rows + i.min(rows - 1)) * columns
                + j
        };
        let whole_bias: Vec<f32> = pairs().map(|pair| bias[element(pair)]).collect();
        let whole_mask: Vec<u8> = pairs().map(|pair| mask[element(pair)]).collect();
        let given = attend(false, ScoreOptions::new().bias(&bias, shape).mask(&mask, shape));
        let whole = attend(
            false,
            ScoreOptions::new().bias(&whole_bias, extents).mask(&whole_mask, extents),
        );
        assert_eq!(given.bits(), whole.bits(), "{shape:?}");
        assert!(
            given
                .weights
                .iter()
                .zip(&whole_mask)
                .all(|(weight, mask)| (*weight == 0.0) == (*mask == 0)),
            "{shape:?}"
        );
    }
}

#[test]
fn a_bias_is_added_as_floats_or_halves_and_minus_infinity_masks() {
    let (floats, halves) =
        ([0.0, 1.0, -2.0, 0.5, -3.0], [0x0000u16, 0x3c00, 0xc000, 0x3800, 0xc200]);
    let of_floats = attend(false, ScoreOptions::new().bias(&floats, [1, 1, 1, ROWS]));
    let of_halves =
        attend(false, ScoreOptions::new().bias(Elements::F16(&halves), [1, 1, 1, ROWS]));
    assert_eq!(of_halves.bits(), of_floats.bits());
    let sums: Vec<f32> = of_floats
        .scaled
        .iter()
        .zip(floats.iter().cycle())
        .map(|(score, bias)| score + bias)
        .collect();
    assert_near(&of_floats.masked, &sums, 1e-6);

    let bias: Vec<f32> =
        triangle().iter().map(|mask| if *mask == 0 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let masked = attend(false, ScoreOptions::new().bias(&bias, [1, 1, ROWS, ROWS]));
    assert_eq!(masked.bits(), attend(true, ScoreOptions::new()).bits());
}

#[test]
fn each_option_does_what_its_formula_says() {
    let (plain, new) = (plain(), ScoreOptions::new);
    let capped: Vec<f32> = plain.scaled.iter().map(|score| 0.5 * (score / 0.5).tanh()).collect();
    assert_near(&attend(false, new().softcap(0.5)).softcapped, &capped, 1e-6);

    // distances of -1, 0, 1
    let (slopes, table) = (alibi_slopes(HEADS).unwrap(), [0.5, -1.0, 0.25, 2.0, 3.0, -0.5]);
    let of_slopes: Vec<f32> =
        pairs().map(|[_, head, i, j]| -slopes[head] * i.abs_diff(j) as f32).collect();
    let of_table: Vec<f32> =
        pairs().map(|[_, head, i, j]| table[3 * head + (j + 1).saturating_sub(i).min(2)]).collect();
    for (options, bias) in
        [(new().alibi_slopes(&slopes), of_slopes), (new().relative_bias(&table, 1, 1), of_table)]
    {
        let by_hand = attend(false, new().bias(&bias, [BATCH, HEADS, ROWS, ROWS]));
        assert_near(&attend(false, options).output, &by_hand.output, 1e-6);
    }

    let rows = numbers(HEADS * ROWS * 4, 9); // distances of -1 to 2
    let of_rows: Vec<f32> = pairs()
        .map(|[_, head, i, j]| rows[4 * (head * ROWS + i) + (j + 1).saturating_sub(i).min(3)])
        .collect();
    let by_hand = attend(false, new().bias(&of_rows, [BATCH, HEADS, ROWS, ROWS]));
    assert_eq!(
        attend(false, new().relative_rows(&rows, [1, HEADS, ROWS, 4], 1)).bits(),
        by_hand.bits()
    );

    let sinks = [1.5, f32::NEG_INFINITY]; // of the second head none
    let with_sinks: Vec<f32> = (0..)
        .zip(&plain.lse)
        .map(|(row, lse)| (lse.exp() + sinks[row / ROWS % HEADS].exp()).ln())
        .collect();
    assert_near(&attend(false, new().sinks(&sinks)).lse, &with_sinks, 1e-6);

    let factors = [0.25, 0.5, 1.0, 2.0, 4.0];
    let scaled: Vec<f32> =
        pairs().zip(&plain.scaled).map(|([_, _, i, _], score)| factors[i] * score).collect();
    assert_eq!(attend(false, new().q_scales(&factors.repeat(BATCH))).scaled, scaled);

    let of_heads: Vec<f32> =
        (0..).zip(&plain.output).map(|(i, value)| [0.0, -2.0][i / 4 % HEADS] * value).collect();
    assert_eq!(attend(false, new().head_scales(&[0.0, -2.0])).output, of_heads);
}

#[test]
fn numbers_that_do_not_fit_are_errors() {
    assert_eq!(
        error_of(alibi_slopes(0), ErrorKind::InvalidValue),
        "num_heads is 0; set it to 1 to 2147483647"
    );
    error_of(alibi_slopes(usize::MAX), ErrorKind::OutOfMemory);
    let t5 = |heads, farthest, left| t5_relative_bias(&[0.5; 64], heads, farthest, true, left, 1);
    error_of(t5(2, 8, 1), ErrorKind::InvalidValue);
    error_of(t5(3, 128, 1), ErrorKind::SliceLength);
    error_of(t5(2, 0, 1), ErrorKind::InvalidValue);
    error_of(t5(2, 128, usize::MAX), ErrorKind::OutOfMemory);

    let (layer, x, mut y) = (layer(), numbers(32, 5), [7.0; 32]);
    let halves = ScoreOptions::new().bias(Elements::Bf16(&[0]), [1; 4]);
    let sentence = layer.forward(&x, &mut y).score(halves).refused(ErrorKind::InvalidValue);
    assert!(sentence.starts_with("score_arrays.bias.type is "), "{sentence}");
    let few = ScoreOptions::new().relative_rows(&[0.5; 2], [1, 1, 1, 2], 2);
    let sentence = layer.forward(&x, &mut y).score(few).refused(ErrorKind::Shape);
    let said = "relative_rows is [batch 1, num_heads 1, n_q 1, columns 2], but left is 2; a row \
        has left + 1 numbers or more";
    assert_eq!(sentence, said);
    let mut ring =
        KvCache::new(&CacheConfig::for_layer(layer.shape(), 32).kind(CacheKind::Ring)).unwrap();
    let call = layer
        .forward(&x, &mut y)
        .causal()
        .window_left(4)
        .cache(&mut ring)
        .score(ScoreOptions::new().mask(&[1], [1; 4]));
    let sentence = call.refused(ErrorKind::InvalidValue);
    assert!(sentence.contains("ring") && sentence.contains("MHA_COLUMNS_NEW_KEYS"), "{sentence}");
    assert_eq!((y, ring.length(0).unwrap()), ([7.0; 32], 0));
}

#[test]
fn chosen_keys_are_those_that_a_query_attends_to() {
    let (q, k, v) = (numbers(2 * 8, 1), numbers(6 * 8, 2), numbers(6 * 8, 3));
    let attend = |lists: &[i32], extents, block| {
        let mut y = [0.0; 16];
        let score = ScoreOptions::new().chosen_keys(lists, extents, block);
        Attention::new(2, 4).call(&q, &mut y).key_value(&k, &v).score(score).alone().map(|()| y)
    };
    let mut first = [0.0; 16]; // of the keys 0 to 3
    Attention::new(2, 4).call(&q, &mut first).key_value(&k[..32], &v[..32]).done();
    assert_eq!(attend(&[3, 1, 0, 2, -1], [1, 1, 1, 5], 1).unwrap(), first);
    assert_eq!(attend(&[1, 0], [1, 1, 1, 2], 2).unwrap(), first);
    let sentence = error_of(attend(&[6], [1, 1, 1, 1], 1), ErrorKind::InvalidValue);
    assert!(
        sentence.starts_with(
            "score_arrays.chosen_keys[0, 0, 0, 0] (sequence, kv head, row, entry) is 6"
        ),
        "{sentence}"
    );
}
