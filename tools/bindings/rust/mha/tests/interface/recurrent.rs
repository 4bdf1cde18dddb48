//! Recurrent attention and the convolution before it.

use mha::{
    CausalConv, Elements, ElementsMut, ErrorKind, Gate, RecurrentAttention, Scheduler, Strides,
    Workspace,
};

use crate::support::{assert_near, bits, error_of, numbers, Alone};

struct InTurn;

impl Scheduler for InTurn {
    fn num_threads(&self) -> usize {
        2
    }

    fn parallel_for(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(task);
    }
}

/// The gated delta rule in double precision, for one sequence of 2 query heads, 1 key head and 2
/// states of 3 x 2: the output, and the states at its end.
fn plain(
    rows: usize, q: &[f32], k: &[f32], v: &[f32], decay: &[f32], beta: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let (mut output, mut states) = (vec![], vec![0.0f64; 2 * 3 * 2]);
    for t in 0..rows {
        for head in 0..2 {
            let (state, q, k) =
                (&mut states[head * 6..][..6], &q[t * 6 + head * 3..][..3], &k[t * 3..][..3]);
            let (decay, beta) =
                (f64::from(decay[t * 2 + head]).exp(), f64::from(beta[t * 2 + head]));
            for j in 0..2 {
                let recalled: f64 =
                    (0..3).map(|i| f64::from(k[i]) * decay * state[i * 2 + j]).sum();
                let change = beta * (f64::from(v[t * 4 + head * 2 + j]) - recalled);
                (0..3).for_each(|i| {
                    state[i * 2 + j] = decay * state[i * 2 + j] + f64::from(k[i]) * change
                });
                output.push(
                    (0..3).map(|i| f64::from(q[i]) * state[i * 2 + j]).sum::<f64>() as f32 * 0.5,
                );
            }
        }
    }
    (output, states.iter().map(|number| *number as f32).collect())
}

#[test]
fn the_delta_rule_is_that_of_double_precision_at_once_and_in_parts() {
    let (q, k, v) = (numbers(2 * 6 * 6, 1), numbers(2 * 6 * 3, 2), numbers(2 * 6 * 4, 3));
    let decay: Vec<f32> = numbers(2 * 6 * 2, 4).iter().map(|number| -number.abs()).collect();
    let beta: Vec<f32> = numbers(2 * 6 * 2, 5).iter().map(|number| number.abs()).collect();
    let attention = RecurrentAttention::new(2, 3).num_k_heads(1usize).head_dim_v(2usize).scale(0.5);
    let (mut y, mut state, mut snapshots, mut workspace) =
        (vec![0.0; 48], vec![0.0; 24], vec![0.0; 2 * 2 * 12], Workspace::new());
    let call = attention.call(&q, &k, &v, &mut y).batch(2usize).decay(&decay).beta(&beta);
    call.state_out(&mut state).snapshots(2, &mut snapshots).run(&mut workspace).unwrap();
    for b in 0..2 {
        let of = |x: &[f32]| x[b * x.len() / 2..(b + 1) * x.len() / 2].to_vec();
        let (output, states) = plain(6, &of(&q), &of(&k), &of(&v), &of(&decay), &of(&beta));
        assert_near(&of(&y), &output, 1e-5);
        assert_near(&of(&state), &states, 1e-5);
    }
    // The second sequence alone, cut, on threads, by strides; then as packed rows, of which the
    // first sequence has none.
    let half = |x: &[f32]| x[x.len() / 2..].to_vec();
    let (q, k, v, decay, beta, mut part, mut kept) =
        (half(&q), half(&k), half(&v), half(&decay), half(&beta), vec![0.0; 24], vec![0.0; 12]);
    for (first, end) in [(0, 4), (4, 5), (5, 6)] {
        let call = attention
            .call(
                &q[first * 6..end * 6],
                &k[first * 3..],
                &v[first * 4..],
                &mut part[first * 4..end * 4],
            )
            .rows(end - first);
        let (row, k_row, v_row, gate) =
            (Strides { row: 6, ..Strides::default() }, Strides { row: 3, head: 3, batch: 0 }, 4, 2);
        let call = call
            .q_strides(row)
            .k_strides(k_row)
            .v_strides(Strides { row: v_row, ..Strides::default() });
        let gates = Strides { row: gate, ..Strides::default() };
        let call = call
            .decay(&decay[first * 2..])
            .decay_strides(gates)
            .beta(&beta[first * 2..])
            .beta_strides(gates);
        call.scheduler(&InTurn).update_state(&mut kept).run(&mut workspace).unwrap();
        if end == 5 {
            assert_eq!(bits(&kept), bits(&snapshots[24..36]));
        }
    }
    assert_eq!((bits(&part), bits(&kept)), (bits(&y[24..]), bits(&state[12..])));
    let (mut packed, mut states) = (vec![0.0; 24], vec![7.0; 24]);
    let call =
        attention.call(&q, &k, &v, &mut packed).decay(&decay).beta(&beta).cu_seqlens_q(&[0, 0, 6]);
    assert!(call.info().unwrap().operations > 6 * 2 * 3 * 2);
    call.state_out(&mut states).run(&mut workspace).unwrap();
    assert_eq!(
        (bits(&packed), &states[..12], bits(&states[12..])),
        (bits(&part), &[0.0; 12][..], bits(&kept))
    );
}

#[test]
fn raw_gates_shared_betas_norms_and_16_bits() {
    let (rows, raw, a_log, mut workspace) =
        (numbers(5 * 4, 1), numbers(5 * 2, 2), numbers(2, 3), Workspace::new());
    macro_rules! run {
        ($attention:expr, |$call:ident| $make:expr) => {{
            let mut y = vec![0.0; 20];
            let $call = $attention.call(&rows, &rows, &rows, &mut y);
            $make.run(&mut workspace).unwrap();
            y
        }};
    }
    let attention = RecurrentAttention::new(2, 2).norm_epsilon(1e-6);
    let sigmoid: Vec<f32> = raw.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    let decay: Vec<f32> = raw
        .iter()
        .enumerate()
        .map(|(i, x)| -a_log[i % 2].exp() * (x + a_log[i % 2]).exp().ln_1p())
        .collect();
    let expected = run!(attention, |call| call.decay(&decay).beta(&sigmoid));
    let y = run!(attention.beta_function(Gate::Sigmoid), |call| call
        .decay(&raw)
        .a_log(&a_log)
        .dt_bias(&a_log)
        .beta(&raw));
    assert_near(&y, &expected, 1e-5);
    let one: Vec<f32> = sigmoid.iter().step_by(2).copied().collect();
    let twice: Vec<f32> = one.iter().flat_map(|beta| [*beta; 2]).collect();
    assert_eq!(
        run!(attention, |call| call.shared_beta(&one)),
        run!(attention, |call| call.beta(&twice))
    );
    let wide = [1.0f32, 0.5].repeat(10);
    let halves: Vec<u16> = wide.iter().map(|number| (number.to_bits() >> 16) as u16).collect();
    let (q, mut narrow, mut y) = (Elements::Bf16(&halves), vec![0; 20], vec![0.0; 20]);
    attention.call(q, q, q, ElementsMut::Bf16(&mut narrow)).run(&mut workspace).unwrap();
    attention.call(&wide, &wide, &wide, &mut y).run(&mut workspace).unwrap();
    assert!(y
        .iter()
        .zip(&narrow)
        .all(|(y, bits)| (y - f32::from_bits(u32::from(*bits) << 16)).abs() <= y.abs() / 256.0));
}

#[test]
fn a_convolution_is_the_sum_of_rows_at_once_and_in_parts() {
    let (x, weights, bias, before, mut workspace) =
        (numbers(7 * 3, 1), numbers(3 * 3, 2), numbers(3, 3), numbers(2 * 3, 4), Workspace::new());
    let whole = [before.clone(), x.clone()].concat();
    let sums = |at: usize| {
        (0..3).map(|j| whole[at + j * 3] * weights[at % 3 * 3 + j]).sum::<f32>() + bias[at % 3]
    };
    let expected: Vec<f32> = (0..21).map(|at| sums(at) / (1.0 + (-sums(at)).exp())).collect();
    let conv = CausalConv::new(3, 3, &weights).bias(bias.as_slice()).silu();
    let (mut y, mut state) = (vec![0.0; 21], vec![0.0; 6]);
    conv.call(&x, &mut y).state(&before).state_out(&mut state).run(&mut workspace).unwrap();
    assert_near(&y, &expected, 1e-5);
    assert_eq!(state, x[15..]);
    let (mut spread, mut kept) = (vec![0.0; 6 * 4 + 3], before.clone());
    for (first, end) in [(0, 1), (1, 7)] {
        let call = conv
            .call(&x[first * 3..end * 3], &mut spread[first * 4..(end - 1) * 4 + 3])
            .rows(end - first)
            .x_strides(0, 3);
        call.output_strides(0, 4)
            .scheduler(&InTurn)
            .update_state(&mut kept)
            .run(&mut workspace)
            .unwrap();
    }
    assert_eq!((bits(&spread[20..23]), kept), (bits(&y[15..18]), state));
    let mut padded = vec![7.0; 21];
    conv.call(&x, &mut padded).q_first_rows(&[2]).q_lengths(&[4]).run(&mut workspace).unwrap();
    assert_eq!((&padded[..6], &padded[18..]), (&[0.0; 6][..], &[0.0; 3][..]));
    error_of(conv.call(&x, &mut y).info(), ErrorKind::InvalidValue);
}

#[test]
fn slices_are_checked_and_nothing_is_written() {
    let (x, mut y, mut state) = (numbers(64, 1), vec![7.0; 24], vec![7.0; 24]);
    // of 2 rows: q 12, k 6, v 8
    let attention = RecurrentAttention::new(2, 3).num_k_heads(1usize).head_dim_v(2usize);
    // Rows of a table: elements of q, k, v and output, what is set, and the sentence of the error.
    macro_rules! refused {
        ($([($q:expr, $k:expr, $v:expr, $y:expr) $($set:tt)*] $sentence:expr;)*) => {$(
            let call = attention.call(&x[..$q], &x[..$k], &x[..$v], &mut y[..$y])$($set)*;
            let found = call.refused(ErrorKind::SliceLength);
            assert!(found.starts_with($sentence), "{found}");
            assert!(y.iter().chain(&state).all(|number| *number == 7.0));
        )*};
    }
    refused! {
        [(13, 6, 8, 8)] "q has 13 elements, which is no whole number of rows";
        [(12, 7, 8, 8)] "k has 7 elements; [batch 1, rows 2, num_k_heads 1, head_dim 3] are 6";
        [(12, 6, 7, 8)] "v has 7 elements";
        [(12, 6, 8, 9)] "output has 9 elements; [batch 1, rows 2, heads 2, head_dim_v 2] are 8";
        [(12, 6, 8, 8) .decay(&x[..3])]
            "decay has 3 elements; [batch 1, rows 2, num_v_heads 2, decay_dim 1] are 4";
        [(12, 6, 8, 8) .beta(&x[..2])] "beta has 2 elements";
        [(12, 6, 8, 8) .shared_beta(&x[..4])]
            "shared_beta has 4 elements; [batch 1, rows 2] are 2";
        [(12, 6, 8, 8) .a_log(&x[..1])] "a_log has 1 elements";
        [(12, 6, 8, 8) .dt_bias(&x[..1])] "dt_bias has 1 elements";
        [(12, 6, 8, 8) .state(&x[..11])] "state has 11 elements";
        [(12, 6, 8, 8) .state_out(&mut state[..13])]
            "state_out has 13 elements; [sequences 1, num_v_heads 2, head_dim 3";
        [(12, 6, 8, 8) .update_state(&mut state[..12]).cu_seqlens_q(&[0, 1, 2])]
            "state_out has 12 elements; [sequences 2";
        [(12, 6, 8, 8) .snapshots(3, &mut state[..24])]
            "snapshots has 24 elements; [sequences 1, count 3";
        [(12, 6, 8, 8) .rows(2usize).q_strides(Strides { row: 7, ..Strides::default() })]
            "q has 12 elements; [batch 1, rows 2";
        [(12, 6, 8, 8) .q_lengths(&[])] "q_lengths has 0 elements";
    }

    let conv = |weights, bias| CausalConv::new(3, 2, weights).bias(bias);
    let run = |conv: CausalConv, x: &[f32], y: &mut [f32]| {
        conv.call(x, y).refused(ErrorKind::SliceLength)
    };
    assert_eq!(
        run(conv(&x[..5], &x[..3]), &x[..6], &mut y[..6]),
        "weights has 5 elements; [channels 3, kernel_size 2] are 6"
    );
    assert_eq!(
        run(conv(&x[..6], &x[..2]), &x[..6], &mut y[..6]),
        "bias has 2 elements; [channels 3] are 3"
    );
    assert_eq!(
        run(conv(&x[..6], &x[..3]), &x[..6], &mut y[..7]),
        "output has 7 elements; [batch 1, rows 2, channels 3] are 6"
    );
    run(conv(&x[..6], &x[..3]), &x[..7], &mut y[..6]);
    let conv = conv(&x[..6], &x[..3]);
    let short = conv.call(&x[..6], &mut y[..6]).state(&x[..2]).alone();
    assert_eq!(
        error_of(short, ErrorKind::SliceLength),
        "state has 2 elements; [sequences 1, kernel_size - 1 1, channels 3] are 3"
    );
    let narrow = conv.call(&x[..6], &mut y[..6]).rows(2usize).x_strides(0, 4).alone();
    error_of(narrow, ErrorKind::SliceLength);
    let wrong = RecurrentAttention::new(3, 2)
        .num_k_heads(2usize)
        .call(&x[..6], &x[..4], &x[..6], &mut y[..6])
        .alone();
    assert!(error_of(wrong, ErrorKind::Shape).starts_with("num_k_heads is 2"));
    assert!(y.iter().all(|number| *number == 7.0));
}
