//! A slice of the wrong length is an error, with a sentence, and nothing is written.

use mha::{
    Arithmetic, Attention, CacheConfig, ContextNorm, Elements, ErrorKind, Forward, Gate, KvCache,
    Layer, LayerConfig, Matrix, Norm, Outputs, Rope, RopeConfig, ScoreColumns, ScoreOptions,
    Segments, Strides, Type, WeightLayout, Weights, Workspace,
};

use crate::support::{error_of, layer, numbers, Alone};

/// Rows of a table: weights and config, and the sentence of their error.
macro_rules! refused {
    ($([$($given:tt)*] $sentence:expr;)*) => { $(refused($($given)*, $sentence);)* };
}

#[track_caller]
fn refused(weights: Weights<'_>, config: LayerConfig, sentence: &str) {
    assert_eq!(error_of(Layer::new(&config, &weights), ErrorKind::SliceLength), sentence);
    error_of(Layer::pack(&config, &weights), ErrorKind::SliceLength);
}

#[test]
fn of_weights() {
    let (w, config) = (vec![0.5; 2048], LayerConfig::new(8, 4).num_kv_heads(2).head_dim_v(3));
    let (q, k, v, o) = (&w[..64], &w[..32], &w[..48], &w[..60]);
    let with_output = config.output_dim(5);
    Layer::new(&with_output, &Weights::new(q, k, v).output(o)).unwrap();
    refused! {
        [Weights::new(&w[..63], k, v), config]
            "w_q has 63 elements; [query_dim 8, num_heads * head_dim 8] are 64";
        [Weights::new(q, &w[..33], v), config]
            "w_k has 33 elements; [key_dim 8, num_kv_heads * head_dim 4] are 32";
        [Weights::new(q, k, k), config]
            "w_v has 32 elements; [value_dim 8, num_kv_heads * head_dim_v 6] are 48";
        [Weights::new(q, k, v).output(q), with_output]
            "w_o has 64 elements; [num_heads * head_dim_v 12, output_dim 5] are 60";
    }
    let out_in = Weights::new(&w[..1], k, v).layout(WeightLayout::OutIn);
    refused! {
        [out_in, config] "w_q has 1 elements; [num_heads * head_dim 8, query_dim 8] are 64";
        [Weights::fused(&w[..143]), config]
            "w_qkv has 143 elements; [query_dim 8, columns of Q, K and V 18] are 144";
    }
    let strided = Weights::new(Matrix::f32(&w[..77]).stride(10), k, v);
    refused! {
        [strided, config]
            "w_q has 77 elements; [query_dim 8, num_heads * head_dim 8] with strides [10] reach \
                over 78";
    }

    let plain = Weights::new(q, k, v).output(o);
    refused! {
        [plain.clone().query_bias(&w[..7]), with_output]
            "w_q.bias has 7 elements; [columns 8] are 8";
        [plain.clone().key_bias(&w[..5]), with_output] "w_k.bias has 5 elements; [columns 4] are 4";
        [plain.clone().value_bias(&w[..5]), with_output]
            "w_v.bias has 5 elements; [columns 6] are 6";
        [plain.clone().fused_bias(&w[..17]), with_output]
            "w_qkv.bias has 17 elements; [columns 18] are 18";
        [plain.output_bias(&w[..4]), with_output] "w_o.bias has 4 elements; [columns 5] are 5";
    }
}

#[test]
fn of_gates() {
    let (w, config) = (vec![0.5; 2048], LayerConfig::new(8, 4).head_dim_v(3).gate(Gate::Sigmoid));
    let (q, k, v) = (&w[..64], &w[..64], &w[..96]);
    let weights = Weights::new(q, k, v).gate(&w[..96]);
    assert_eq!(Layer::new(&config, &weights).unwrap().shape().gate_dim, 3);
    refused! {
        [Weights::new(q, k, v).gate(&w[..95]), config]
            "w_g has 95 elements; [query_dim 8, num_heads * gate_dim 12] are 96";
        [weights.clone().gate_bias(&w[..11]), config]
            "w_g.bias has 11 elements; [columns 12] are 12";
        [Weights::new(q, k, v).gate_in_query(), config]
            "w_q has 64 elements; [query_dim 8, num_heads * head_dim 20] are 160";
    }
    let in_query = Weights::new(&w[..160], k, v).query_bias(&w[..20]).gate_in_query();
    Layer::new(&config, &in_query).unwrap();
}

#[test]
fn of_stored_weights() {
    let (scales, config) =
        (vec![0.5; 64], LayerConfig::new(40, 1).head_dim(2).weight_type(Type::Int4));
    let (codes, fits) = (vec![0x88u8; 41], Matrix::int4(&[0x88; 40], &[0.5; 4]));
    let of = |w_q| Weights::new(w_q, fits, fits).layout(WeightLayout::OutIn);
    Layer::new(&config, &of(fits)).unwrap();
    refused! {
        [of(Matrix::int4(&codes, &scales[..4])), config]
            "w_q has 41 elements; [num_heads * head_dim 2, bytes 20] are 40";
    }
    let few = "w_q.scales has 3 elements; [num_heads * head_dim 2, groups 2] are 4";
    refused! {
        [of(Matrix::int4(&codes[..40], &scales[..3])), config] few;
    }
    let strided = Matrix::int4(&codes, &scales[..4]).stride(44);
    refused! {
        [of(strided), config]
            "w_q has 41 elements; [num_heads * head_dim 2, bytes 20] with strides [22] reach over \
                42";
    }

    let config = config.weight_type(Type::Int8);
    let codes = vec![1i8; 80];
    let int8 = |codes, scales| {
        Weights::new(
            Matrix::int8(codes, scales),
            Matrix::int8(&[1; 80], &[0.5; 2]),
            Matrix::int8(&[1; 80], &[0.5; 2]),
        )
    };
    Layer::new(&config, &int8(&codes, &scales[..2])).unwrap();
    refused! {
        [int8(&codes[1..], &scales[..2]), config]
            "w_q has 79 elements; [query_dim 40, num_heads * head_dim 2] are 80";
        [int8(&codes, &scales[..1]), config]
            "w_q.scales has 1 elements; [num_heads * head_dim 2, groups 1] are 2";
    }
    let without =
        Weights::new(Elements::Int8(&codes), Elements::Int8(&codes), Elements::Int8(&codes));
    error_of(Layer::new(&config, &without), ErrorKind::NullPointer);

    let config = LayerConfig::linear(300, 1).weight_type(Type::Int5).group_size(32);
    let config = config.scale_type(Type::Int8).arithmetic(Arithmetic::Int8);
    let codes = vec![-16i8; 300];
    let factors = |scales, offsets| {
        let matrix = Matrix::int8(&codes, &[1.0; 10]).offsets(&[1.0; 10]);
        Weights::linear(matrix.block_scales(scales).block_offsets(offsets))
    };
    refused! {
        [factors(&scales[..1], &scales[..2]), config]
            "w_o.block_scales has 1 elements; [output_dim 1, blocks 2] are 2";
        [factors(&scales[..2], &scales[..3]), config]
            "w_o.block_offsets has 3 elements; [output_dim 1, blocks 2] are 2";
    }
}

/// Rows of a table: what is set in a call, and the sentence of its error.
macro_rules! forward_refused {
    ($([$($set:tt)*] $sentence:expr;)*) => {
        $(forward_refused(|call| call$($set)*, $sentence);)*
    };
}

/// Runs a call whose slices do not fit. Its output, which the call borrows, has to stay as it was.
#[track_caller]
fn forward_refused(make: impl for<'a> Fn(Forward<'a>) -> Forward<'a>, sentence: &str) {
    let (layer, x, mut y) = (layer(), numbers(3 * 32, 1), [7.0; 3 * 32]);
    assert_eq!(make(layer.forward(&x, &mut y)).refused(ErrorKind::SliceLength), sentence);
    assert_eq!(y, [7.0; 96]);
    error_of(make(layer.forward(&x, &mut y)).workspace_bytes(), ErrorKind::SliceLength);
    error_of(make(layer.forward(&x, &mut y)).info(), ErrorKind::SliceLength);
}

#[test]
fn of_rows() {
    let (layer, x, mut y) = (layer(), numbers(4 * 32, 1), [7.0; 4 * 32]);
    let run = |x: &[f32], y: &mut [f32], batch| {
        layer.forward(x, y).batch(batch).refused(ErrorKind::SliceLength)
    };
    let no_rows = "query has 33 elements, which is no whole number of rows for each of 1 \
        sequences; a row has 32";
    assert_eq!(run(&x[..33], &mut y, 1), no_rows);
    run(&x[..96], &mut y[..96], 2);
    run(&x, &mut y, usize::MAX);
    let no_batch = "batch is 0; set it to the number of sequences in query, which has 128 elements";
    assert_eq!(run(&x, &mut y, 0), no_batch);
    assert_eq!(
        run(&x, &mut y[..127], 2),
        "output has 127 elements; [batch 2, n_q 2, output_dim 32] are 128"
    );
    run(&[], &mut y, 1);
    assert_eq!(y, [7.0; 128]);

    let packed = "packed sequences are the rows of a batch of 1, and cu_seqlens_q says where each \
        begins and the last one ends";
    forward_refused! {
        [.cu_seqlens_q(&[])] &format!("cu_seqlens_q has 0 elements and batch is 1; {packed}");
        [.cu_seqlens_q(&[0])] &format!("cu_seqlens_q has 1 elements and batch is 1; {packed}");
    }
    let two = "q_first_positions has 1 elements; [sequences 2] are 2";
    forward_refused! {
        [.cu_seqlens_q(&[0, 1, 3]).q_first_positions(&[0])] two;
        [.cu_seqlens_q(&[0, 3]).cu_seqlens_kv(&[0])]
            "cu_seqlens_kv has 1 elements; [sequences + 1 2] are 2";
        [.q_first_rows(&[0, 0])] "q_first_rows has 2 elements; [sequences 1] are 1";
        [.key(&[0.0; 32]).kv_first_rows(&[])] "kv_first_rows has 0 elements; [sequences 1] are 1";
        [.n_q(2)] "query has 96 elements; [batch 1, n_q 2, query_dim 32] are 64";
        [.n_q(2).query_strides(0, 65)]
            "query has 96 elements; [batch 1, n_q 2, query_dim 32] with strides [130, 65] reach \
                over 97";
        [.output_strides(0, 33)]
            "output has 96 elements; [batch 1, n_q 3, output_dim 32] with strides [99, 33] reach \
                over 98";
        [.output_strides(usize::MAX, usize::MAX)]
            "output has 96 elements; [batch 1, n_q 3, output_dim 32] with strides \
                [18446744073709551615, 18446744073709551615] reach over 18446744073709551615";
        [.key(&[0.0; 65])]
            "key has 65 elements, which is no whole number of rows for each of 1 sequences; a row \
                has 32";
        [.key(&[0.0; 64]).value(&[0.0; 32])]
            "value has 32 elements; [batch 1, n_kv 2, value_dim 32] are 64";
        [.key(&[0.0; 64]).n_kv(3)] "key has 64 elements; [batch 1, n_kv 3, key_dim 32] are 96";
        [.key(&[0.0; 64]).n_kv(2).key_strides(0, 40)]
            "key has 64 elements; [batch 1, n_kv 2, key_dim 32] with strides [80, 40] reach over \
                72";
    }
    let sentence = layer.forward(&x, &mut y).query_strides(0, 32).refused(ErrorKind::InvalidValue);
    assert_eq!(sentence, "query has strides, so that its length does not tell the rows; set n_q");
    layer.forward(&x, &mut y).value(&x[..64]).refused(ErrorKind::Shape);
}

#[test]
fn of_lists_and_optional_outputs() {
    forward_refused! {
        [.q_first_positions(&[])] "q_first_positions has 0 elements; [sequences 1] are 1";
        [.q_lengths(&[1, 1])] "q_lengths has 2 elements; [sequences 1] are 1";
        [.key(&[0.0; 32]).kv_lengths(&[1, 1])] "kv_lengths has 2 elements; [sequences 1] are 1";
        [.cache_sequences(&[1, 1])] "cache_sequences has 2 elements; [sequences 1] are 1";
    }

    // Rows of a table: an array of these, what is set, and the sentence of the error.
    macro_rules! output_refused {
        ($([$arrays:pat, $($set:tt)*] $sentence:expr;)*) => {$({
            let (layer, x, mut y) = (layer(), numbers(3 * 32, 1), [7.0; 3 * 32]);
            let mut arrays = [vec![7.0; 95], vec![7.0; 47], vec![7.0; 11], vec![7.0; 35]];
            let $arrays = &mut arrays;
            let call = layer.forward(&x, &mut y)$($set)*;
            assert_eq!(call.refused(ErrorKind::SliceLength), $sentence);
            assert!(arrays.concat().iter().chain(&y).all(|value| *value == 7.0));
        })*};
    }
    let (new, pairs) =
        (Outputs::new, "has 35 elements; [batch 1, num_heads 4, n_q 3, n_kv 3] are 36");
    output_refused! {
        [[.., lse, _], .lse(lse)] "lse has 11 elements; [batch 1, num_heads 4, n_q 3] are 12";
        [[.., w], .attention_weights(w)] format!("attention_weights {pairs}");
        [[.., s], .outputs(new().scores(s))] format!("outputs.scores {pairs}");
        [[.., s], .outputs(new().scaled_scores(s))] format!("outputs.scaled_scores {pairs}");
        [[.., s], .outputs(new().softcapped_scores(s))]
            format!("outputs.softcapped_scores {pairs}");
        [[.., s], .outputs(new().masked_scores(s))] format!("outputs.masked_scores {pairs}");
        [[q, ..], .outputs(new().q(q))]
            "outputs.q has 95 elements; [batch 1, n_q 3, num_heads 4, head_dim 8] are 96";
        [[_, k, ..], .outputs(new().k(k))]
            "outputs.k has 47 elements; [batch 1, n_kv 3, num_kv_heads 2, head_dim 8] are 48";
        [[_, v, ..], .outputs(new().v(v))]
            "outputs.v has 47 elements; [batch 1, n_kv 3, num_kv_heads 2, head_dim_v 8] are 48";
        [[context, ..], .outputs(new().context(context))]
            "outputs.context has 95 elements; [batch 1, n_q 3, num_heads 4, head_dim_v 8] are 96";
    }
}

#[test]
fn of_outputs_per_pair_with_a_cache() {
    let (layer, x) = (layer(), numbers(6 * 32, 1));
    let mut cache =
        KvCache::new(&CacheConfig::for_layer(layer.shape(), 20).num_sequences(3)).unwrap();
    layer
        .forward(&x[..5 * 32], &mut [0.0; 160])
        .causal()
        .cache(&mut cache)
        .cache_sequences(&[2])
        .done();
    let (mut y, mut weights) = ([7.0; 6 * 32], [7.0; 2 * 4 * 3 * 20]);
    // The call's keys: those of the query, or four of their own for each sequence, some of which
    // may count.
    enum Keys {
        Same,
        Own(Option<[i64; 2]>),
    }
    let key = numbers(2 * 4 * 32, 2);
    let mut pairs = |cache: &mut KvCache, n_kv: usize, lengths: &[i64], keys: Keys| {
        let call = layer
            .forward(&x, &mut y)
            .batch(2)
            .causal()
            .cache(cache)
            .cache_sequences(&[0, 2])
            .q_lengths(lengths);
        let call = if matches!(keys, Keys::Own(_)) { call.key(&key) } else { call };
        let call =
            if let Keys::Own(Some(lengths)) = &keys { call.kv_lengths(lengths) } else { call };
        call.attention_weights(&mut weights[..2 * 4 * 3 * n_kv]).alone()
    };
    // Five rows are there in sequence 2, none in sequence 0.
    let sentence = error_of(pairs(&mut cache, 8, &[3, 2], Keys::Same), ErrorKind::SliceLength);
    assert_eq!(
        sentence,
        "attention_weights has 192 elements; [batch 2, num_heads 4, n_q 3, n_kv 7] are 168"
    );
    error_of(pairs(&mut cache, 6, &[3, 2], Keys::Same), ErrorKind::SliceLength);
    error_of(pairs(&mut cache, 7, &[3, 2], Keys::Own(None)), ErrorKind::SliceLength);
    error_of(pairs(&mut cache, 7, &[3, 2], Keys::Own(Some([3, 4]))), ErrorKind::SliceLength);
    error_of(pairs(&mut cache, 7, &[3, 99], Keys::Same), ErrorKind::SliceLength);
    error_of(pairs(&mut cache, 8, &[3, 99], Keys::Same), ErrorKind::InvalidValue);
    assert_eq!((cache.length(0).unwrap(), cache.length(2).unwrap()), (0, 5));
    pairs(&mut cache, 7, &[3, 2], Keys::Same).unwrap();
    pairs(&mut cache, 11, &[3, 2], Keys::Own(None)).unwrap();
    pairs(&mut cache, 12, &[3, 2], Keys::Own(Some([3, 1]))).unwrap();
    assert_eq!((cache.length(0).unwrap(), cache.length(2).unwrap()), (10, 12));
    for (first_rows, n_kv) in [([0, 2], 13), ([2, 0], 16)] {
        let mut run = |n_kv: usize| {
            let call = layer
                .forward(&x, &mut y)
                .batch(2)
                .causal()
                .cache(&mut cache)
                .cache_sequences(&[0, 2])
                .q_first_rows(&first_rows);
            call.attention_weights(&mut weights[..2 * 4 * 3 * n_kv]).alone()
        };
        error_of(run(n_kv - 1), ErrorKind::SliceLength);
        error_of(run(n_kv + 1), ErrorKind::SliceLength);
        run(n_kv).unwrap();
    }
    let sequences = [7];
    let call = layer
        .forward(&x[..32], &mut y[..32])
        .cache(&mut cache)
        .cache_sequences(&sequences)
        .attention_weights(&mut weights);
    call.refused(ErrorKind::InvalidValue);
}

#[test]
fn of_attention() {
    let (q, k, v) = (numbers(48, 1), numbers(20, 2), numbers(30, 3));
    // Rows of a table: what is set in a call, and the sentence of its error.
    macro_rules! attention_refused {
        ($([$($set:tt)*] $sentence:expr;)*) => {$(
            let mut output = [7.0; 72];
            let call = Attention::new(4, 4).num_kv_heads(1).head_dim_v(6).call(&q, &mut output);
            assert_eq!(call$($set)*.refused(ErrorKind::SliceLength), $sentence);
            assert_eq!(output, [7.0; 72]);
        )*};
    }
    let strides = Strides { row: 5, ..Default::default() };
    attention_refused! {
        [.key_value(&k[..19], &v)] "k has 19 elements, which is no whole number of rows for each \
            of 1 sequences; a row has 4";
        [.key_value(&k, &v[..29])]
            "v has 29 elements; [batch 1, n_kv 5, num_kv_heads 1, head_dim_v 6] are 30";
        [.key_value(&k, &v).n_kv(4)]
            "k has 20 elements; [batch 1, n_kv 4, num_kv_heads 1, head_dim 4] are 16";
        [.key_value(&k, &v).n_q(2)]
            "q has 48 elements; [batch 1, n_q 2, num_heads 4, head_dim 4] are 32";
        [.key_value(&k, &v).n_kv(5).k_strides(strides)]
            "k has 20 elements; [batch 1, n_kv 5, num_kv_heads 1, head_dim 4] with strides [25, \
                5, 4] reach over 24";
        [.key_value(Elements::F16(&[0; 6]), &v)] "k has 6 elements, which is no whole number of \
            rows for each of 1 sequences; a row has 4";
    }
    let mut small = [7.0; 71];
    let call = Attention::new(4, 4)
        .num_kv_heads(0)
        .head_dim_v(0)
        .call(&q, &mut small[..47])
        .key_value(&q, &q);
    let sentence = call.refused(ErrorKind::SliceLength);
    assert_eq!(
        sentence,
        "output has 47 elements; [batch 1, n_q 3, num_heads 4, head_dim_v 4] are 48"
    );
    let call = Attention::new(4, 4).call(&q, &mut small[..48]).n_kv(3);
    call.refused(ErrorKind::NullPointer);
}

#[test]
fn of_a_choice_of_keys() {
    let (q, k, weights) = (numbers(24, 1), numbers(20, 2), numbers(6, 3));
    let check = |weights: &[f32], len: usize, columns: usize, sentence: &str| {
        let (mut chosen, mut scores) = (vec![7; len], vec![7.0; columns]);
        let call = Attention::new(2, 4)
            .choose_keys(&q, weights, 2, &mut chosen)
            .key(&k)
            .index_scores(&mut scores);
        assert_eq!(call.refused(ErrorKind::SliceLength), sentence);
        assert_eq!((chosen, scores), (vec![7; len], vec![7.0; columns]));
    };
    check(&weights[..5], 6, 15, "weights has 5 elements; [batch 1, n_q 3, num_heads 2] are 6");
    check(&weights, 5, 15, "chosen has 5 elements; [batch 1, n_q 3, num_chosen 2] are 6");
    check(&weights, 6, 14, "index_scores has 14 elements; [batch 1, n_q 3, n_kv 5] are 15");
}

#[test]
fn of_rope() {
    let few = "rope_q_positions has 2 elements; [batch 1, n_q 3] are 3";
    forward_refused! {
        [.rope_q_positions(&[1, 2])] few;
        [.rope_k_positions(&[1; 4])] "rope_k_positions has 4 elements; [batch 1, n_kv 3] are 3";
    }
    let of_keys = "rope_k_positions has 3 elements; [batch 1, n_kv 2] are 2";
    forward_refused! {
        [.key(&[0.0; 64]).rope_k_positions(&[1; 3])] of_keys;
    }
    let (layer, x, mut y) = (layer(), numbers(96, 1), [7.0; 96]);
    let mut refused = |rope: &Rope<'_>, kind| layer.forward(&x, &mut y).rope(rope).refused(kind);
    let uneven = "cos has 12 elements and sin 11; both are [num_positions, dims / 2]";
    assert_eq!(refused(&Rope::new(8, &[1.0; 12], &[0.0; 11]), ErrorKind::SliceLength), uneven);
    let short = "cos and sin have 3 elements; a row of 8 dims needs 4";
    assert_eq!(refused(&Rope::new(8, &[1.0; 3], &[0.0; 3]), ErrorKind::SliceLength), short);
    let none = "cos and sin have 0 elements; a row of 0 dims needs 1";
    assert_eq!(refused(&Rope::new(0, &[], &[]), ErrorKind::SliceLength), none);
    let cut =
        "cos and sin have 11 elements, the last 3 of which are no whole row; a row of 8 dims \
        needs 4";
    let rope = Rope::new(8, &[1.0; 11], &[0.0; 11]);
    assert_eq!(refused(&rope, ErrorKind::SliceLength), cut);
    assert_eq!(refused(&rope.clone().table_stride(8), ErrorKind::SliceLength), cut);
    refused(&rope.clone().table_stride(3), ErrorKind::InvalidValue);
    // Two rows: position 2 is outside. After the last row may be what a stride steps over, or a
    // part of it.
    refused(&Rope::new(8, &[1.0; 8], &[0.0; 8]), ErrorKind::InvalidValue);
    for len in [11, 12, 13, 14] {
        refused(
            &Rope::new(8, &[1.0; 14][..len], &[0.0; 14][..len]).table_stride(7),
            ErrorKind::InvalidValue,
        );
    }
    assert_eq!(y, [7.0; 96]);

    let short = RopeConfig::new(8).pair_factors(&[1.0; 3]).tables(3);
    assert_eq!(
        error_of(short, ErrorKind::SliceLength),
        "pair_factors has 3 elements; [dims / 2 4] are 4"
    );
    let short = RopeConfig::new(8).mrope([2, 1, 1], &[1; 8], false).tables(3);
    assert_eq!(
        error_of(short, ErrorKind::SliceLength),
        "positions has 8 elements; [axes 3, num_positions 3] are 9"
    );
    let sentence = error_of(
        RopeConfig::new(8).fill(0, 3, &mut [0.0; 12], &mut [0.0; 11]),
        ErrorKind::SliceLength,
    );
    assert_eq!(sentence, "sin has 11 elements; [num_positions 3, dims / 2 4] are 12");
}

#[test]
fn of_norms() {
    let (rms, layer) = (Norm::rms(1e-6), Norm::layer(1e-6));
    forward_refused! {
        [.norm(rms.q_weight(&[0.5; 9]))] "norm.q_weight has 9 elements; [head_dim 8] are 8";
        [.norm(rms.k_weight(&[0.5; 7]))] "norm.k_weight has 7 elements; [head_dim 8] are 8";
        [.norm(layer.q_bias(&[0.5; 7]))] "norm.q_bias has 7 elements; [head_dim 8] are 8";
        [.norm(layer.k_bias(&[0.5; 0]))] "norm.k_bias has 0 elements; [head_dim 8] are 8";
    }
    let few = "norm.q_weight has 24 elements; [num_heads 4, head_dim 8] are 32";
    forward_refused! {
        [.norm(rms.per_head().q_weight(&[0.5; 24]))] few;
        [.norm(rms.q_weight(&[0.5; 24]).all_heads())] few;
        [.norm(rms.all_heads().k_weight(&[0.5; 8]))]
            "norm.k_weight has 8 elements; [num_kv_heads 2, head_dim 8] are 16";
    }
    let context = ContextNorm::layer(1e-6);
    forward_refused! {
        [.norm(rms.context(context.weight(&[0.5; 9])))]
            "norm.context_weight has 9 elements; [head_dim_v 8] are 8";
        [.norm(Norm::of_context(context.all_heads().bias(&[0.5; 8])))]
            "norm.context_bias has 8 elements; [num_heads 4, head_dim_v 8] are 32";
    }
}

#[test]
fn of_score_options() {
    let new = ScoreOptions::new;
    let relative = "relative_bias has 11 elements; [num_heads 4, left + 1 + right 3] are 12";
    forward_refused! {
        [.score(new().relative_bias(&[0.5; 11], 2, 0))] relative;
        [.score(new().relative_rows(&[0.5; 8], [1, 1, 3, 3], 2))]
            "relative_rows has 8 elements; [batch 1, num_heads 1, n_q 3, columns 3] are 9";
        [.score(new().q_scales(&[0.5; 2]))] "q_scales has 2 elements; [batch 1, n_q 3] are 3";
        [.score(new().sinks(&[0.5; 5]))] "sinks has 5 elements; [num_heads 4] are 4";
        [.score(new().mask(&[1; 8], [1, 1, 3, 3]))]
            "mask has 8 elements; [batch 1, num_heads 1, n_q 3, columns 3] are 9";
        [.score(new().bias(&[0.0; 37], [1, 4, 3, 3]))]
            "bias has 37 elements; [batch 1, num_heads 4, n_q 3, columns 3] are 36";
        [.score(new().bias(Elements::F16(&[0; 2]), [1, 1, 1, 3]))]
            "bias has 2 elements; [batch 1, num_heads 1, n_q 1, columns 3] are 3";
        [.score(new().segments(Segments::Within, &[0; 4], None))]
            "segments of queries has 4 elements; [batch 1, n_q 3] are 3";
    }
    let few = "segments of keys has 2 elements; [batch 1, columns 3] are 3";
    forward_refused! {
        [.score(new().segments(Segments::Also, &[0; 3], Some(&[0; 2])))] few;
    }
    let more = "segments of keys has 3 elements; [batch 1, columns 4] are 4";
    forward_refused! {
        [.score(new().segments(Segments::Also, &[0; 3], Some(&[0; 3])).num_columns(4))] more;
    }
    let beyond =
        "mask has 3 elements; [batch 1, num_heads 4, n_q 1, columns 18446744073709551615] \
        are 18446744073709551615";
    forward_refused! {
        [.score(new().mask(&[1; 3], [1, 4, 1, usize::MAX]))] beyond;
    }
}

#[test]
fn of_num_columns() {
    let (layer, x, mut y) = (layer(), numbers(3 * 32, 1), [7.0; 3 * 32]);
    let mut refused = |options: ScoreOptions<'_>, sentence: &str| {
        assert_eq!(layer.forward(&x, &mut y).score(options).refused(ErrorKind::Shape), sentence);
        assert_eq!(y, [7.0; 96]);
    };
    let short =
        "mask is [batch 1, num_heads 1, n_q 3, columns 2], but there are 3 keys; a row has \
        a column for each";
    refused(ScoreOptions::new().mask(&[1; 6], [1, 1, 3, 2]).num_columns(3), short);
}

#[test]
fn segments_and_short_rows_are_masks() {
    let (layer, x) = (layer(), numbers(3 * 32, 1));
    let run = |options: ScoreOptions<'_>, causal: bool| {
        let (mut y, mut workspace) = ([0.0; 3 * 32], Workspace::new());
        let call = layer.forward(&x, &mut y).score(options);
        (if causal { call.causal() } else { call }).run(&mut workspace).unwrap();
        y
    };
    let new = ScoreOptions::new;
    let within = run(new().mask(&[1, 1, 0, 1, 1, 0, 0, 0, 1], [1, 1, 3, 3]), false);
    assert_eq!(run(new().segments(Segments::Within, &[7, 7, -2], None), false), within);
    assert_eq!(
        run(new().segments(Segments::Within, &[7, 7, -2], Some(&[7, 7, -2])), false),
        within
    );
    let also = run(new().mask(&[1, 1, 0, 1, 1, 0, 1, 1, 1], [1, 1, 3, 3]), false);
    assert_eq!(run(new().segments(Segments::Also, &[7, 7, -2], None), true), also);
    let short = run(new().mask(&[1, 1, 0], [1, 1, 1, 3]), false);
    assert_eq!(run(new().mask(&[1; 2], [1, 1, 1, 2]).num_columns(2), false), short);
}

#[test]
fn of_extents_of_mask_and_bias() {
    let (layer, x, mut y, ones) = (layer(), numbers(3 * 32, 1), [7.0; 3 * 32], [1; 64]);
    let mut refused = |mask: &[u8], extents, sentence: &str| {
        let options = ScoreOptions::new().mask(mask, extents);
        assert_eq!(layer.forward(&x, &mut y).score(options).refused(ErrorKind::Shape), sentence);
        let bias = vec![0.0; mask.len()];
        let call = layer.forward(&x, &mut y).score(ScoreOptions::new().bias(&bias, extents));
        assert_eq!(call.refused(ErrorKind::Shape), sentence.replace("mask is", "bias is"));
        assert_eq!(y, [7.0; 96]);
    };
    for (extents, wrong) in [
        ([2, 1, 3, 3], "batch is 1; pass 1, or 1"),
        ([1, 2, 3, 3], "num_heads is 4; pass 4, or 1"),
        ([1, 1, 2, 3], "n_q is 3; pass 3, or 1"),
        ([1, 1, 0, 3], "n_q is 3; pass 3, or 1"),
    ] {
        let [batch, num_heads, n_q, columns] = extents;
        let said = format!(
            "mask is [batch {batch}, num_heads {num_heads}, n_q {n_q}, columns {columns}], but \
            {wrong} if all have the same"
        );
        refused(&ones[..extents.iter().product()], extents, &said);
    }
    let few =
        "mask is [batch 1, num_heads 1, n_q 1, columns 2], but there are 3 keys; a row has a \
        column for each";
    refused(&ones[..2], [1, 1, 1, 2], few);
}

#[test]
fn of_masks_with_a_cache() {
    let (layer, x, ones) = (layer(), numbers(5 * 32, 1), [1; 64]);
    let mut cache =
        KvCache::new(&CacheConfig::for_layer(layer.shape(), 20).num_sequences(2)).unwrap();
    layer.forward(&x, &mut [0.0; 160]).causal().cache(&mut cache).cache_sequences(&[1]).done();
    let run = |cache: &mut KvCache, extents: [usize; 4], columns| {
        let options = ScoreOptions::new()
            .mask(&ones[..extents.iter().product()], extents)
            .column_keys(columns);
        let mut y = [7.0; 2 * 2 * 32];
        let call = layer
            .forward(&x[..2 * 2 * 32], &mut y)
            .batch(2)
            .causal()
            .cache(cache)
            .q_lengths(&[2, 1])
            .score(options);
        let result = call.alone();
        assert!(result.is_ok() || y == [7.0; 2 * 2 * 32]);
        result
    };
    // Sequence 0 will hold two positions, and sequence 1 six.
    let few =
        "mask is [batch 1, num_heads 1, n_q 1, columns 5], but there are 6 keys; a row has a \
        column for each";
    assert_eq!(
        error_of(run(&mut cache, [1, 1, 1, 5], ScoreColumns::AllKeys), ErrorKind::Shape),
        few
    );
    error_of(run(&mut cache, [2, 1, 2, 5], ScoreColumns::AllKeys), ErrorKind::Shape);
    let few =
        "mask is [batch 1, num_heads 1, n_q 2, columns 1], but there are 2 keys; a row has a \
        column for each";
    assert_eq!(
        error_of(run(&mut cache, [1, 1, 2, 1], ScoreColumns::NewKeys), ErrorKind::Shape),
        few
    );
    assert_eq!((cache.length(0).unwrap(), cache.length(1).unwrap()), (0, 5));
    run(&mut cache, [1, 1, 1, 6], ScoreColumns::AllKeys).unwrap();
    assert_eq!((cache.length(0).unwrap(), cache.length(1).unwrap()), (2, 6));
    run(&mut cache, [2, 1, 2, 2], ScoreColumns::NewKeys).unwrap();
}

#[test]
fn of_caches() {
    let mut cache = KvCache::new(&CacheConfig::new(16, 2, 4).head_dim_v(3)).unwrap();
    let sentence = error_of(cache.append(0, &[0.0; 8], &[0.0; 7]), ErrorKind::SliceLength);
    assert_eq!(sentence, "v has 7 elements; [positions 1, num_kv_heads 2, head_dim_v 3] are 6");
    error_of(cache.append(0, &[0.0; 9], &[0.0; 6]), ErrorKind::SliceLength);
    cache.append(0, &[0.0; 8], &[0.0; 6]).unwrap();
    error_of(cache.read(0, 0..1, Some(&mut [0.0; 7]), None), ErrorKind::SliceLength);
    error_of(cache.read(0, 0..1, None, Some(&mut [0.0; 8])), ErrorKind::SliceLength);
    error_of(cache.read(0, 0..2, None, Some(&mut [0.0; 12])), ErrorKind::InvalidValue);
}
