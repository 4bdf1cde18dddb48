use mha::{
    partials_merge, Attention, Elements, ErrorKind, InstructionSet, KvCache, Rope, RopeConfig,
    RopeStyle, ScoreOptions, Strides,
};

use crate::support::{assert_near, bits, error_of, numbers, Alone};

#[test]
fn attention_gives_weighted_means_that_can_be_worked_out_by_hand() {
    // One head of width 1: scores are q k, weights 3 to 1.
    let (q, k, v, mut output) = ([3f32.ln()], [1.0, 0.0], [4.0, 8.0], [0.0]);
    let (mut weights, mut lse) = ([0.0; 2], [0.0]);
    let call = Attention::new(1, 1).call(&q, &mut output).key_value(&k, &v);
    call.attention_weights(&mut weights).lse(&mut lse).done();
    assert_near(&weights, &[0.75, 0.25], 1e-6);
    assert_near(&output, &[5.0], 1e-5);
    assert_near(&lse, &[4f32.ln()], 1e-6);
}

#[test]
fn partials_of_two_parts_lead_to_the_bits_of_one_call() {
    let (q, k, v) = (numbers(2 * 8, 1), numbers(300 * 8, 2), numbers(300 * 6, 3));
    let attention = Attention::new(2, 4).head_dim_v(3);
    let (mut expected, mut expected_lse) = (vec![0.0; 2 * 6], vec![0.0; 4]);
    let sinks = [0.5, -0.25];
    let call = attention
        .call(&q, &mut expected)
        .key_value(&k, &v)
        .score(ScoreOptions::new().sinks(&sinks))
        .lse(&mut expected_lse);
    call.window_left(100usize).done();
    let mut parts = [vec![0.0; 2 * 2 * 5], vec![0.0; 2 * 2 * 5]];
    for (part, keys) in parts.iter_mut().zip([0..256, 256..300]) {
        let (k, v) = (&k[keys.start * 8..keys.end * 8], &v[keys.start * 6..keys.end * 6]);
        let call = attention
            .call_partials(&q, part)
            .key_value(k, v)
            .kv_first_position(keys.start)
            .q_first_positions(&[298]);
        call.window_left(100usize).done();
    }
    let [mut partials, right] = parts;
    partials_merge(3, &mut partials, &right).unwrap();
    let (mut output, mut lse) = (vec![0.0; 2 * 6], vec![0.0; 4]);
    attention.finish_partials(1, &partials, Some(&sinks), None, &mut output, &mut lse).unwrap();
    assert_eq!((bits(&output), bits(&lse)), (bits(&expected), bits(&expected_lse)));

    let kind = |error: mha::Error| error.kind();
    assert_eq!(
        partials_merge(3, &mut partials, &right[5..]).map_err(kind),
        Err(ErrorKind::SliceLength)
    );
    assert_eq!(
        attention
            .finish_partials(1, &partials, Some(&sinks[1..]), None, &mut output, &mut lse)
            .map_err(kind),
        Err(ErrorKind::SliceLength)
    );
    assert_eq!(
        attention
            .finish_partials(1, &partials[1..], None, None, &mut output, &mut lse)
            .map_err(kind),
        Err(ErrorKind::SliceLength)
    );
    let call = attention.call_partials(&q, &mut partials[1..]).key_value(&k, &v);
    assert_eq!(call.alone().map_err(kind), Err(ErrorKind::SliceLength));
}

#[test]
fn strides_tell_where_heads_lie() {
    let (q, k, v) =
        (numbers(2 * 3 * 2 * 4, 1), numbers(2 * 5 * 2 * 4, 2), numbers(2 * 5 * 2 * 4, 3));
    let attention = Attention::new(2, 4);
    let mut expected = vec![0.0; q.len()];
    attention.call(&q, &mut expected).batch(2).key_value(&k, &v).done();

    // [batch, n, heads, width] to [batch, heads, n, width]
    let heads_first = |rows: &[f32], n: usize| {
        let at = |b: usize, h: usize, i: usize| rows[((b * n + i) * 2 + h) * 4..][..4].to_vec();
        (0..2 * 2 * n)
            .flat_map(|index| at(index / n / 2, index / n % 2, index % n))
            .collect::<Vec<f32>>()
    };
    let (q, k, v) = (heads_first(&q, 3), heads_first(&k, 5), heads_first(&v, 5));
    let mut output = vec![0.0; q.len()];
    let strides = |n| Strides::heads_first(2, n, 4);
    let call = attention.call(&q, &mut output).batch(2).n_q(3).n_kv(5).key_value(&k, &v);
    let call = call
        .q_strides(strides(3))
        .k_strides(strides(5))
        .v_strides(strides(5))
        .output_strides(strides(3));
    call.done();
    assert_eq!(bits(&output), bits(&heads_first(&expected, 3)));
}

#[test]
fn keys_and_values_of_16_bits_are_taken_as_the_floats_that_they_are() {
    let (q, attention) = (
        numbers(2 * 8, 1),
        Attention::new(2, 4).num_kv_heads(1).instruction_set(InstructionSet::AUTO),
    );
    let halves: Vec<u16> =
        numbers(3 * 4, 2).iter().map(|value| (value.to_bits() >> 16) as u16).collect();
    let floats: Vec<f32> =
        halves.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
    let (mut expected, mut output) = (vec![0.0; 16], vec![0.0; 16]);
    attention.call(&q, &mut expected).key_value(&floats, &floats).done();
    attention
        .call(&q, &mut output)
        .key_value(Elements::Bf16(&halves), Elements::Bf16(&halves))
        .done();
    assert_eq!(bits(&output), bits(&expected));

    let ones = [0x3c00u16; 12]; // 1 in binary16
    attention.call(&q, &mut output).key_value(Elements::F16(&ones), Elements::F16(&ones)).done();
    assert_near(&output, &[1.0; 16], 1e-6);
    let codes = [1i8; 12];
    attention
        .call(&q, &mut output)
        .key_value(Elements::Int8(&codes), Elements::Int8(&codes))
        .refused(ErrorKind::InvalidValue);
}

#[test]
fn windows_and_lengths_say_which_keys_take_part() {
    let (q, k) = ([0.0; 4], [0.0; 4]);
    let v = [1.0, 2.0, 4.0, 8.0]; // of which each query takes the mean
    let mean = |call: fn(mha::AttentionCall<'_>) -> mha::AttentionCall<'_>| {
        let mut output = [f32::NAN; 4];
        call(Attention::new(1, 1).call(&q, &mut output).key_value(&k, &v)).done();
        output
    };
    assert_near(&mean(|call| call), &[3.75; 4], 1e-6);
    assert_near(&mean(|call| call.causal()), &[1.0, 1.5, 7.0 / 3.0, 3.75], 1e-6);
    assert_near(&mean(|call| call.window_left(0)), &[3.75, 14.0 / 3.0, 6.0, 8.0], 1e-6);
    assert_near(&mean(|call| call.window_left(0).window_right(0)), &[1.0, 2.0, 4.0, 8.0], 1e-6);
    assert_near(&mean(|call| call.q_lengths(&[2]).kv_lengths(&[2])), &[1.5, 1.5, 0.0, 0.0], 1e-6);
    assert_near(
        &mean(|call| call.q_first_rows(&[1]).q_lengths(&[2]).kv_first_rows(&[2])),
        &[0.0, 6.0, 6.0, 0.0],
        1e-6,
    );
    assert_near(
        &mean(|call| call.causal().q_first_rows(&[2]).kv_first_rows(&[2])),
        &[0.0, 0.0, 4.0, 6.0],
        1e-6,
    );
    assert_near(
        &mean(|call| call.causal().q_first_positions(&[1])),
        &[1.5, 7.0 / 3.0, 3.75, 3.75],
        1e-6,
    );
}

#[test]
fn rotation_turns_pairs_by_the_angles_of_the_tables() {
    // With v = 1 everywhere only scores can tell; keys read back from a cache are the rotated ones.
    let tables = RopeConfig::new(4).tables(3).unwrap();
    assert_near(&tables.cos()[2..4], &[1f32.cos(), 0.01f32.cos()], 1e-7);
    let (q, k, v) = (numbers(3 * 4, 1), numbers(3 * 4, 2), numbers(3 * 4, 3));
    let rotated_at = |rope: &Rope<'_>, positions: Option<&[i64; 3]>| {
        let mut cache = KvCache::new(&mha::CacheConfig::new(16, 1, 4)).unwrap();
        let mut output = [0.0; 12];
        let call = Attention::new(1, 4)
            .call(&q, &mut output)
            .key_value(&k, &v)
            .cache(&mut cache)
            .rope(rope);
        let call = if let Some(positions) = positions {
            call.rope_q_positions(&[2, 2, 2]).rope_k_positions(positions)
        } else {
            call
        };
        call.done();
        let mut keys = [0.0; 12];
        cache.read(0, 0..3, Some(&mut keys), None).unwrap();
        keys
    };
    let rotated = |rope: &Rope<'_>| rotated_at(rope, None);
    let by = |a: f32, b: f32, angle: f32| {
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    };
    let half = rotated(&tables);
    assert_eq!(half[..4], k[..4], "position 0 stays");
    assert_near(&[half[4], half[6]], &by(k[4], k[6], 1.0), 1e-6);
    let interleaved = rotated(&tables.clone().style(RopeStyle::Interleaved));
    assert_near(&interleaved[4..6], &by(k[4], k[5], 1.0), 1e-6);
    let elsewhere = rotated_at(&tables, Some(&[1, 1, 1]));
    assert_near(&[elsewhere[8], elsewhere[10]], &by(k[8], k[10], 1.0), 1e-6);

    // Tables of the caller's, two columns of four; half of the head.
    let (mut cos, mut sin) = ([f32::NAN; 10], [f32::NAN; 10]);
    for p in 0..3 {
        (cos[4 * p], sin[4 * p]) = ((p as f32).cos(), (p as f32).sin());
    }
    let part = rotated(&Rope::new(2, &cos[..9], &sin[..9]).table_stride(4));
    assert_near(&part[4..6], &by(k[4], k[5], 1.0), 1e-6);
    assert_eq!(part[6..8], k[6..8]);
    let end = rotated(&Rope::new(2, &cos[..9], &sin[..9]).table_stride(4).offset(2));
    assert_near(&end[6..8], &by(k[6], k[7], 1.0), 1e-6);
    assert_eq!(end[4..6], k[4..6]);
}

#[test]
fn parts_of_tables_are_those_of_the_whole() {
    let config =
        RopeConfig::new(8).base(5e5).yarn(4.0, 64).yarn_betas(16.0, 2.0).attention_factor(1.0);
    let whole = config.tables(20).unwrap();
    let (mut cos, mut sin) = ([0.0; 5 * 4], [0.0; 5 * 4]);
    config.fill(10, 5, &mut cos, &mut sin).unwrap();
    assert_eq!((bits(&cos), bits(&sin)), (bits(&whole.cos()[40..60]), bits(&whole.sin()[40..60])));

    let halved = RopeConfig::new(8).linear(2.0).tables(3).unwrap();
    assert_eq!(halved.cos()[8..], RopeConfig::new(8).tables(2).unwrap().cos()[4..]);
    let factors = RopeConfig::new(8)
        .pair_factors(&[1.0, 2.0, 1.0, 2.0])
        .attention_factor(2.0)
        .tables(3)
        .unwrap();
    assert_eq!(factors.sin()[2 * 4 + 1], 2.0 * halved.sin()[2 * 4 + 1]);
    let plain = RopeConfig::new(8).tables(10).unwrap();
    for (is_interleaved, axes) in [(false, [0, 0, 1, 2]), (true, [0, 1, 2, 0])] {
        let of_axes = RopeConfig::new(8)
            .mrope([2, 1, 1], &[5, 6, 7, 8, 9, 0], is_interleaved)
            .tables(2)
            .unwrap();
        let expected: Vec<f32> =
            (0..4).map(|pair| plain.cos()[[5, 7, 9][axes[pair]] * 4 + pair]).collect();
        assert_eq!(of_axes.cos()[..4], expected);
    }
    let slow = |config: RopeConfig| config.tables(2).unwrap().sin()[7];
    let plain = slow(RopeConfig::new(8));
    assert_eq!(slow(RopeConfig::new(8).llama3(4.0, 64)), slow(RopeConfig::new(8).linear(4.0)));
    assert_eq!(slow(RopeConfig::new(8).llama3(4.0, 64).llama3_freq_factors(1e-6, 1e-5)), plain);
    assert!(slow(RopeConfig::new(8).dynamic_ntk(4.0, 64, 100)) < plain);
    assert_eq!(slow(RopeConfig::new(8).dynamic_ntk(4.0, 64, 64)), plain);
    let yarn = RopeConfig::new(8).yarn(4.0, 64);
    let second = |config: RopeConfig| config.tables(2).unwrap().sin()[5];
    assert_ne!(second(yarn), second(yarn.yarn_unrounded()));
    assert_ne!(second(yarn), second(yarn.attention_factor(1.0)));
    error_of(yarn.llama3(4.0, 64).tables(3), ErrorKind::InvalidValue);
    error_of(RopeConfig::new(7).tables(3), ErrorKind::InvalidValue);
    error_of(RopeConfig::new(8).tables(usize::MAX), ErrorKind::OutOfMemory);
}

#[test]
fn keys_are_chosen_by_their_index_scores() {
    // Two heads of width 1: the score of a key is 2 max(0, k) - max(0, -k).
    let (q, weights, k) = ([1.0, -1.0], [2.0, -1.0], [1.0, -3.0, 2.0, -1.0, 1.0]);
    let (mut chosen, mut scores) = ([0; 4], [0.0; 5]);
    let attention = Attention::new(2, 1).scale(1.0);
    let call =
        attention.choose_keys(&q, &weights, 4, &mut chosen).key(&k).index_scores(&mut scores);
    assert!(call.workspace_bytes().unwrap() > 0);
    error_of(call.info(), ErrorKind::InvalidValue);
    call.done();
    assert_eq!((chosen, scores), ([0, 2, 3, 4], [2.0, -3.0, 4.0, -1.0, 2.0]));

    let mut cache = KvCache::new(&mha::CacheConfig::new(8, 1, 1).values_in_keys(true)).unwrap();
    let mut run = |k: &[f32], chosen: &mut [i32]| {
        attention.choose_keys(&q, &weights, chosen.len(), chosen).key(k).cache(&mut cache).done();
    };
    run(&k[..1], &mut chosen);
    assert_eq!(chosen, [0, -1, -1, -1]);
    run(&k[1..], &mut chosen[..2]);
    assert_eq!(chosen, [0, 2, -1, -1]);
    let mut scores = [0.0; 5];
    let call = attention.choose_keys(&q, &weights, 1, &mut chosen[..1]).cache_read(&cache);
    let sentence =
        call.cache_sequences(&[]).index_scores(&mut scores).refused(ErrorKind::SliceLength);
    assert_eq!(sentence, "cache_sequences has 0 elements; [sequences 1] are 1");
    let call = attention.choose_keys(&q, &weights, 1, &mut chosen[..1]).cache_read(&cache);
    call.index_scores(&mut scores).done();
    assert_eq!((chosen[0], scores[1]), (2, -3.0));
}

#[test]
fn attention_says_how_it_would_be_run() {
    let (q, k, v) = (numbers(2 * 10 * 64, 1), numbers(2 * 30 * 32, 2), numbers(2 * 30 * 16, 3));
    let attention = Attention::new(4, 16).num_kv_heads(2).head_dim_v(8).scale(0.5);
    let mut output = vec![0.0; 2 * 10 * 32];
    let call = attention.call(&q, &mut output).batch(2).key_value(&k, &v).causal();
    let info = call.info().unwrap();
    assert_eq!((info.packed_bytes, info.contract), (0, mha::contract()));
    assert_eq!(call.workspace_bytes().unwrap(), info.workspace_bytes);
}
