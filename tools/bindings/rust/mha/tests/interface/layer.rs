use mha::{
    AlignedBuffer, Arithmetic, CacheConfig, Elements, ErrorKind, Forward, InstructionSet, KvCache,
    Layer, LayerConfig, Matrix, Outputs, RopeConfig, Type, WeightLayout, Weights, Workspace,
};

use crate::support::{assert_near, bits, error_of, layer, numbers, Alone};

fn run(layer: &Layer, x: &[f32]) -> Vec<f32> {
    let shape = layer.shape();
    let mut y = vec![f32::NAN; x.len() / shape.query_dim * shape.output_dim];
    layer.forward(x, &mut y).causal().done();
    y
}

fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    (0..matrix.len()).map(|i| matrix[i % rows * columns + i / rows]).collect()
}

#[test]
fn a_small_layer_gives_the_numbers_of_the_computation_in_double_precision() {
    // Those of tests/consumers/layer.c.
    let fill = |count: usize, step: usize| {
        (0..count).map(|i| (i * step % 11) as f32 / 4.0 - 1.25).collect::<Vec<f32>>()
    };
    let (x, w_qkv, b_qkv, w_o) = (fill(12, 3), fill(48, 7), fill(12, 5), fill(16, 4));
    let layer = Layer::new(
        &LayerConfig::new(4, 2),
        &Weights::fused(&w_qkv).fused_bias(&b_qkv).output(&w_o),
    )
    .unwrap();
    let expected = [
        [0.640625, -1.15625, 0.484375, -1.484375],
        [0.667_038_3, -1.031_985_3, 0.241_142_67, -1.019_055_4],
        [-0.664_366_3, -1.813_540_6, 1.409_164_1, -2.132_034_8],
    ];
    assert_near(&run(&layer, &x), &expected.concat(), 2e-6);
}

#[test]
fn shape_has_all_defaults_resolved() {
    let w = numbers(6 * 12, 1);
    let layer =
        Layer::new(&LayerConfig::new(6, 2), &Weights::new(&w[..36], &w[..36], &w[..36])).unwrap();
    let shape = *layer.shape();
    assert_eq!((shape.key_dim, shape.value_dim, shape.output_dim), (6, 6, 6));
    assert_eq!((shape.num_kv_heads, shape.head_dim, shape.head_dim_v), (2, 3, 3));
    assert_eq!(shape.scale, 1.0 / 3f32.sqrt());
}

#[test]
fn every_form_of_the_weights_gives_the_same_bits() {
    let (config, x) = (LayerConfig::new(8, 2).num_kv_heads(1), numbers(5 * 8, 9));
    let (w_q, w_k, w_v, w_o) = (numbers(64, 1), numbers(32, 2), numbers(32, 3), numbers(64, 4));
    let (b_q, b_k, b_v, b_o) = (numbers(8, 5), numbers(4, 6), numbers(4, 7), numbers(8, 8));
    let y_of = |weights: Weights| {
        bits(&run(&Layer::new(&config, &weights.output_bias(&b_o)).unwrap(), &x))
    };
    let expected = y_of(
        Weights::new(&w_q, &w_k, &w_v)
            .output(&w_o)
            .query_bias(&b_q)
            .key_bias(&b_k)
            .value_bias(&b_v),
    );
    let b_qkv = [&b_q[..], &b_k, &b_v].concat();
    let check = |weights: Weights| assert_eq!(y_of(weights.fused_bias(&b_qkv)), expected);

    let fused: Vec<f32> = (0..8)
        .flat_map(|row| [&w_q[row * 8..][..8], &w_k[row * 4..][..4], &w_v[row * 4..][..4]].concat())
        .collect();
    check(Weights::fused(&fused).output(&w_o));
    let [q, k, v, o] = [(&w_q, 8), (&w_k, 4), (&w_v, 4), (&w_o, 8)]
        .map(|(matrix, columns)| transposed(matrix, columns));
    check(Weights::new(&q, &k, &v).output(&o).layout(WeightLayout::OutIn));
    let wide: Vec<f32> = w_q.chunks(8).flat_map(|row| [row, &[f32::NAN; 3]].concat()).collect();
    check(Weights::new(Matrix::f32(&wide).stride(11), &w_k, &w_v).output(&w_o));
}

#[test]
fn weights_are_kept_in_every_type() {
    let (x, w) = (numbers(4 * 64, 1), numbers(64 * 64, 2));
    let of = |kind| {
        Layer::new(&LayerConfig::new(64, 4).weight_type(kind), &Weights::new(&w, &w, &w).output(&w))
            .unwrap()
    };
    let exact = run(&of(Type::F32), &x);
    let packed_bytes =
        |layer: &Layer| layer.forward(&x, &mut vec![0.0; x.len()]).info().unwrap().packed_bytes;
    let mut larger = packed_bytes(&of(Type::F32));
    for (kind, error) in
        [(Type::F16, 0.02), (Type::Bf16, 0.2), (Type::Int8, 0.4), (Type::Int4, 5.0)]
    {
        let layer = of(kind);
        assert_eq!(layer.shape().weight_type, kind);
        assert_near(&run(&layer, &x), &exact, error);
        assert!(kind == Type::Bf16 || packed_bytes(&layer) < larger);
        larger = packed_bytes(&layer);
    }
}

#[test]
fn codes_and_scales_of_a_quantiser_are_taken_as_they_are() {
    let x = numbers(3 * 8, 1);
    let codes: Vec<i8> = (0..64).map(|i| (i * 37 % 15 - 7) as i8).collect(); // [out, in]
    let scales: Vec<f32> = (1..=8).map(|i| i as f32 / 64.0).collect();
    let floats: Vec<f32> =
        codes.iter().zip(0..).map(|(code, i)| f32::from(*code) * scales[i / 8]).collect();
    let nibbles: Vec<u8> =
        codes.chunks(2).map(|pair| (pair[0] + 8) as u8 | ((pair[1] + 8) as u8) << 4).collect();

    let config = LayerConfig::new(8, 2);
    let all = |matrix: Matrix<'_>, kind| {
        let weights =
            Weights::new(matrix, matrix, matrix).output(matrix).layout(WeightLayout::OutIn);
        run(&Layer::new(&config.weight_type(kind), &weights).unwrap(), &x)
    };
    let expected = all(Matrix::f32(&floats), Type::F32);
    assert_near(&all(Matrix::int8(&codes, &scales), Type::Int8), &expected, 1e-5);
    assert_near(&all(Matrix::int4(&nibbles, &scales), Type::Int4), &expected, 1e-5);

    // bf16 of numbers that are bf16 is exact.
    let halves: Vec<u16> = floats.iter().map(|value| (value.to_bits() >> 16) as u16).collect();
    let kept: Vec<f32> = halves.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
    let same = all(Matrix::from(Elements::Bf16(&halves)), Type::F32);
    assert_eq!(bits(&same), bits(&all(Matrix::f32(&kept), Type::F32)));

    let mixed = Weights::new(&floats, Matrix::bf16(&halves), &floats);
    let sentence = error_of(Layer::new(&config, &mixed), ErrorKind::InvalidValue);
    assert_eq!(
        sentence,
        "the weight matrices are F32 and Bf16; all of a layer must be of one type"
    );
}

#[test]
fn a_packed_layer_is_borrowed_or_owned_and_gives_the_same_bits() {
    let (w, x, config) = (numbers(16 * 48, 1), numbers(6 * 16, 2), LayerConfig::new(16, 4));
    let weights = Weights::fused(&w);
    let expected = bits(&run(&Layer::new(&config, &weights).unwrap(), &x));

    let packed = Layer::pack(&config, &weights).unwrap();
    assert_eq!(bits(&run(&Layer::from_packed(&packed[..]).unwrap(), &x)), expected);

    let path = std::env::temp_dir().join(format!("mha-rust-test-{}.mha", std::process::id()));
    std::fs::write(&path, &packed).unwrap();
    let from_file = Layer::from_packed(AlignedBuffer::read_file(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bits(&run(&from_file.unwrap(), &x)), expected);

    // Several layers in one file, which they share: an owner that is a part of something.
    struct Part(std::sync::Arc<AlignedBuffer>, std::ops::Range<usize>);
    impl AsRef<[u8]> for Part {
        fn as_ref(&self) -> &[u8] {
            &self.0[self.1.clone()]
        }
    }
    let file =
        std::sync::Arc::new(AlignedBuffer::copy_of(&[&packed[..], &packed[..]].concat()).unwrap());
    let layers: Vec<Layer<'static>> = (0..2)
        .map(|i| {
            Layer::from_packed(Part(file.clone(), i * packed.len()..(i + 1) * packed.len()))
                .unwrap()
        })
        .collect();
    drop(file);
    assert_eq!(bits(&run(&layers[1], &x)), expected);
}

#[test]
fn a_packed_layer_that_is_damaged_is_an_error() {
    let w = numbers(16 * 48, 1);
    let (config, weights) = (LayerConfig::new(16, 4), Weights::fused(&w));
    let mut packed = Layer::pack(&config, &weights).unwrap();
    Layer::verify(&packed).unwrap();
    error_of(Layer::from_packed(&packed[..64]), ErrorKind::PackedFormat);
    error_of(Layer::from_packed(&packed[1..]), ErrorKind::InvalidValue);
    error_of(Layer::from_packed(&packed[..0]), ErrorKind::PackedFormat);
    let last = packed.len() / 2;
    packed[last] ^= 1;
    error_of(Layer::verify(&packed), ErrorKind::PackedChecksum);
}

#[test]
fn every_instruction_set_gives_the_same_bits_and_one_that_is_missing_is_an_error() {
    let (w, x) = (numbers(16 * 48, 1), numbers(7 * 16, 2));
    let of = |set| Layer::with_instruction_set(&LayerConfig::new(16, 4), &Weights::fused(&w), set);
    let expected = bits(&run(&of(InstructionSet::AUTO).unwrap(), &x));
    let packed = Layer::pack(&LayerConfig::new(16, 4), &Weights::fused(&w)).unwrap();
    for set in InstructionSet::available() {
        let layer = of(set).unwrap();
        assert_eq!(layer.forward(&x, &mut [0.0; 7 * 16]).info().unwrap().instruction_set, set);
        assert_eq!(bits(&run(&layer, &x)), expected, "{set}");
        assert_eq!(
            bits(&run(&Layer::from_packed_with_instruction_set(&packed[..], set).unwrap(), &x)),
            expected,
            "{set}"
        );
    }
    let all = [InstructionSet::AVX2, InstructionSet::AVX512, InstructionSet::NEON];
    let missing = all.into_iter().find(|set| !set.is_available()).expect("no machine has all");
    error_of(of(missing), ErrorKind::InstructionSet);
}

#[test]
fn cross_attention_takes_keys_and_values_of_their_own() {
    let (w_q, w_k, w_v) = (numbers(8 * 8, 1), numbers(6 * 8, 2), numbers(4 * 8, 3));
    let layer = Layer::new(
        &LayerConfig::new(8, 2).key_dim(6).value_dim(4),
        &Weights::new(&w_q, &w_k, &w_v),
    )
    .unwrap();
    let (query, key, value) = (numbers(2 * 3 * 8, 4), numbers(2 * 5 * 6, 5), numbers(2 * 5 * 4, 6));
    let (mut y, mut weights) = (vec![0.0; 2 * 3 * 8], vec![0.0; 2 * 2 * 3 * 5]);
    layer
        .forward(&query, &mut y)
        .batch(2)
        .key(&key)
        .value(&value)
        .attention_weights(&mut weights)
        .done();
    assert!(weights.chunks(5).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-6));

    // Its second sequence alone has the same bits, out of and into arrays with strides too.
    let mut alone = vec![f32::NAN; 3 * 10];
    let wide: Vec<f32> =
        query[24..].chunks(8).flat_map(|row| [row, &[f32::NAN; 1]].concat()).collect();
    layer
        .forward(&wide, &mut alone)
        .n_q(3)
        .query_strides(0, 9)
        .output_strides(0, 10)
        .key(&key[30..])
        .value(&value[20..])
        .done();
    let rows: Vec<f32> = alone.chunks(10).flat_map(|row| row[..8].to_vec()).collect();
    assert_eq!(bits(&rows), bits(&y[24..]));
    assert!(alone[8].is_nan() && alone[9].is_nan());
}

#[test]
fn packed_and_padded_sequences_have_the_bits_that_each_has_alone() {
    let (layer, x) = (layer(), numbers(7 * 32, 1));
    let check = |rows: std::ops::Range<usize>, set: for<'a> fn(Forward<'a>) -> Forward<'a>| {
        let (mut y, mut alone) = (vec![f32::NAN; 7 * 32], vec![0.0; rows.len() * 32]);
        set(layer.forward(&x, &mut y).causal()).done();
        let rows = rows.start * 32..rows.end * 32;
        layer.forward(&x[rows.clone()], &mut alone).causal().done();
        assert_eq!(bits(&y[rows]), bits(&alone));
    };
    check(0..3, |call| call.cu_seqlens_q(&[0, 3, 3, 7]));
    check(3..7, |call| call.cu_seqlens_q(&[0, 3, 3, 7]));
    check(1..7, |call| call.q_first_rows(&[1]));
    check(2..5, |call| call.q_first_rows(&[2]).q_lengths(&[3]));
    check(0..3, |call| call.q_lengths(&[3]));
    check(4..7, |call| call.q_first_rows(&[4]).q_lengths(&[3]));
}

#[test]
fn packed_sequences_have_their_own_places_in_a_cache_and_their_own_tables_rows() {
    let (layer, x, tables) = (layer(), numbers(7 * 32, 1), RopeConfig::new(8).tables(20).unwrap());
    let cache =
        || KvCache::new(&CacheConfig::for_layer(layer.shape(), 8).num_sequences(3)).unwrap();
    let (mut packed, mut padded) = (cache(), cache());
    let (mut y, mut lse, mut expected, mut expected_lse) =
        (vec![0.0; 7 * 32], vec![0.0; 4 * 7], vec![0.0; 8 * 32], vec![0.0; 8 * 4]);
    let (sequences, positions) = ([2, 0], [5, 6, 7, 1, 2, 3, 4]);
    let call = layer
        .forward(&x, &mut y)
        .causal()
        .cu_seqlens_q(&[0, 3, 7])
        .cache(&mut packed)
        .cache_sequences(&sequences)
        .lse(&mut lse);
    let call = call.rope(&tables).rope_q_positions(&positions).rope_k_positions(&positions);
    call.done();
    assert_eq!([0, 1, 2].map(|sequence| packed.length(sequence).unwrap()), [4, 0, 3]);

    // The same two sequences, padded on the left to four rows each.
    let (x, positions) = ([&[f32::NAN; 32], &x[..]].concat(), [0, 5, 6, 7, 1, 2, 3, 4]);
    let call = layer
        .forward(&x, &mut expected)
        .batch(2)
        .causal()
        .q_first_rows(&[1, 0])
        .cache(&mut padded)
        .cache_sequences(&sequences);
    let call = call
        .lse(&mut expected_lse)
        .rope(&tables)
        .rope_q_positions(&positions)
        .rope_k_positions(&positions);
    call.done();
    assert_eq!((&expected[..32], bits(&y)), (&[0.0; 32][..], bits(&expected[32..])));
    for head in 0..4 {
        let of_padded: Vec<f32> =
            [&expected_lse[head * 4 + 1..][..3], &expected_lse[16 + head * 4..][..4]].concat();
        assert_eq!(bits(&lse[head * 7..][..7]), bits(&of_padded));
    }
    assert_eq!(packed.as_bytes(), padded.as_bytes());
}

#[test]
fn packed_sequences_cover_all_rows_of_one_batch() {
    let (layer, x) = (layer(), numbers(7 * 32, 1));
    let run = |starts: &[i64]| {
        let mut y = vec![7.0; 7 * 32];
        let result = layer.forward(&x, &mut y).causal().cu_seqlens_q(starts).alone();
        assert!(result.is_ok() || y == [7.0; 7 * 32]);
        result
    };
    run(&[0, 7]).unwrap();
    for starts in [[1, 3, 7], [0, 8, 7], [-1, 3, 7]] {
        error_of(run(&starts), ErrorKind::InvalidValue);
    }
    for starts in [[0, 3, 6], [0, 3, 8]] {
        let sentence = error_of(run(&starts), ErrorKind::Shape);
        assert!(sentence.starts_with("sequences.cu_seqlens_q[2] is "), "{sentence}");
    }
    let mut y = vec![7.0; 8 * 32];
    let batch = layer.forward(&[0.5; 8 * 32], &mut y).batch(2).cu_seqlens_q(&[0, 4, 8]).alone();
    let said = "cu_seqlens_q has 3 elements and batch is 2; packed sequences are the rows of a \
        batch of 1, and cu_seqlens_q says where each begins \
                and the last one ends";
    assert_eq!(error_of(batch, ErrorKind::SliceLength), said);
}

#[test]
fn equal_scores_are_means_of_the_values() {
    let (layer, x) = (layer(), numbers(3 * 32, 1));
    let (mut y, mut weights) = (vec![0.0; 96], vec![0.0; 4 * 9]);
    layer.forward(&x, &mut y).causal().equal_scores().attention_weights(&mut weights).done();
    let row = |keys: usize| (0..3).map(move |key| if key < keys { 1.0 / keys as f32 } else { 0.0 });
    assert_near(&weights, &(0..4).flat_map(|_| (1..4).flat_map(row)).collect::<Vec<f32>>(), 1e-7);
}

#[test]
fn optional_outputs_show_the_steps() {
    let (layer, x) = (layer(), numbers(3 * 32, 1));
    let (mut plain, mut y) = (vec![0.0; 96], vec![0.0; 96]);
    layer.forward(&x, &mut plain).causal().done();
    let [mut q, mut context] = [(); 2].map(|()| vec![0.0; 96]);
    let [mut k, mut v] = [(); 2].map(|()| vec![0.0; 48]);
    let [mut scores, mut scaled, mut masked, mut weights] = [(); 4].map(|()| vec![0.0; 4 * 9]);
    let mut lse = [0.0; 12];
    let outputs = Outputs::new().q(&mut q).k(&mut k).v(&mut v).context(&mut context);
    let outputs = outputs.scores(&mut scores).scaled_scores(&mut scaled).masked_scores(&mut masked);
    layer
        .forward(&x, &mut y)
        .causal()
        .outputs(outputs)
        .attention_weights(&mut weights)
        .lse(&mut lse)
        .done();
    assert_eq!(bits(&y), bits(&plain), "asking changes nothing");

    let dot: f32 = q[..8].iter().zip(&k[..8]).map(|(q, k)| q * k).sum();
    assert_near(&scores[..1], &[dot], 1e-4);
    assert_eq!(scaled[0], scores[0] * layer.shape().scale);
    assert_eq!(masked[..3], [scaled[0], f32::NEG_INFINITY, f32::NEG_INFINITY]);
    assert_eq!(weights[..3], [1.0, 0.0, 0.0]);
    assert_near(&lse[..1], &scaled[..1], 1e-5);
    assert_eq!(context[..8], v[..8]);
}

#[test]
fn one_workspace_of_the_largest_call_serves_all() {
    let (layer, x, mut y) = (layer(), numbers(40 * 32, 1), vec![0.0; 40 * 32]);
    let bytes = layer.forward(&x, &mut y).batch(2).causal().workspace_bytes().unwrap();
    let mut workspace = Workspace::new();
    workspace.reserve(bytes).unwrap();
    for n in [20, 1, 7] {
        layer
            .forward(&x[..2 * n * 32], &mut y[..2 * n * 32])
            .batch(2)
            .causal()
            .run(&mut workspace)
            .unwrap();
    }
    assert_eq!(workspace.len(), bytes);
}

#[test]
fn a_call_says_how_it_would_be_run() {
    let (layer, x, mut y) = (layer(), numbers(64, 1), vec![0.0; 64]);
    let info = layer.forward(&x, &mut y).causal().info().unwrap();
    assert_eq!((info.contract, info.num_threads), (mha::contract(), 1));
    assert_eq!(info.workspace_bytes, layer.forward(&x, &mut y).causal().workspace_bytes().unwrap());
    assert!(info.operations > 0 && info.bytes > 0 && info.packed_bytes > 0);
    assert!(mha::contract() >= mha::CONTRACT);
    assert!(mha::version() >= (0, 1, 0));
}

#[test]
fn projections_compute_in_integers_if_asked() {
    let (w, x) = (numbers(64 * 64, 5), numbers(3 * 64, 6));
    let weights = Weights::new(&w, &w, &w).output(&w);
    let config = LayerConfig::new(64, 4).weight_type(Type::Int8);
    let of_floats = run(&Layer::new(&config, &weights).unwrap(), &x);
    for arithmetic in [Arithmetic::Int8, Arithmetic::Int16] {
        let layer = Layer::new(&config.arithmetic(arithmetic), &weights).unwrap();
        assert_eq!(layer.shape().arithmetic, arithmetic);
        let y = run(&layer, &x);
        assert_ne!(y, of_floats);
        let largest = of_floats.iter().fold(0f32, |most, y| most.max(y.abs()));
        assert!(y.iter().zip(&of_floats).all(|(a, b)| (a - b).abs() < 0.05 * largest));
    }
    let floats = Layer::new(&config.weight_type(Type::F32).arithmetic(Arithmetic::Int8), &weights);
    let said = error_of(floats, ErrorKind::InvalidValue);
    assert!(
        said.starts_with("arithmetic is ") && said.contains(", but weight_type is 1;"),
        "{said}"
    );
}

#[test]
fn projections_compute_in_bf16_if_asked() {
    let (w, x, mut y) = (numbers(64 * 64, 5), numbers(3 * 64, 6), [0.0; 3 * 64]);
    let config = LayerConfig::linear(64, 64).weight_type(Type::Bf16).arithmetic(Arithmetic::Bf16);
    let layer = Layer::new(&config, &Weights::linear(&w)).unwrap();
    assert_eq!(layer.shape().arithmetic, Arithmetic::Bf16);
    layer.linear(&x, &mut y).run(&mut Workspace::new()).unwrap();
    let rounded = |x: f32| {
        let bits = x.to_bits();
        f32::from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000)
    };
    for (i, y) in y.into_iter().enumerate() {
        let add = |sum, k| rounded(x[i / 64 * 64 + k]).mul_add(rounded(w[k * 64 + i % 64]), sum);
        let chain = |k: usize, odd| (k + odd..k + 32).step_by(2).fold(0.0, add);
        let sum = [0, 32].into_iter().fold(0.0, |sum, k| sum + (chain(k, 0) + chain(k, 1)));
        assert_eq!(y, sum, "steps of 32, of even and of odd terms");
    }
    for other in [Type::F32, Type::F16, Type::Int8, Type::Int4] {
        let refused = Layer::new(&config.weight_type(other), &Weights::linear(&w));
        let said = error_of(refused, ErrorKind::InvalidValue);
        assert!(said.contains("MHA_ARITHMETIC_BF16 (1283), but weight_type is "), "{said}");
    }
}

#[test]
fn what_the_library_finds_wrong_has_its_sentence() {
    let w = numbers(64 * 4, 1);
    let sentence =
        error_of(Layer::new(&LayerConfig::new(8, 3), &Weights::fused(&w)), ErrorKind::Shape);
    assert!(sentence.starts_with("num_heads is 3"), "{sentence}");
    error_of(
        Layer::new(&LayerConfig::new(usize::MAX, 1), &Weights::fused(&w)),
        ErrorKind::TooLarge,
    );
    error_of(
        Layer::new(&LayerConfig::new(8, 2).scale(f32::NAN), &Weights::fused(&w)),
        ErrorKind::InvalidValue,
    );
    let large = [1e5; 12];
    error_of(
        Layer::new(&LayerConfig::new(2, 1).weight_type(Type::F16), &Weights::fused(&large)),
        ErrorKind::OutOfRange,
    );
    assert!(format!(
        "{:?}",
        mha::Error::clone(&layer().forward(&[0.0; 31], &mut []).workspace_bytes().unwrap_err())
    )
    .starts_with("SliceLength: "));
}
