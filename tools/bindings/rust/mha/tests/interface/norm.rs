use mha::{Attention, CacheConfig, ContextNorm, ErrorKind, KvCache, Norm, Outputs, RopeConfig};

use crate::support::{assert_near, bits, layer, numbers, Alone};

const WIDTH: usize = 8;

fn attend(q: &[f32], k: &[f32], v: &[f32], norm: Option<Norm<'_>>) -> Vec<f32> {
    let mut output = vec![f32::NAN; q.len()];
    let call = Attention::new(2, WIDTH).call(q, &mut output).key_value(k, v);
    let call = if let Some(norm) = norm { call.norm(norm) } else { call };
    call.done();
    output
}

#[test]
fn norms_are_their_formulas() {
    let [q, k, v] = [1, 2, 3].map(|seed| numbers(5 * 2 * WIDTH, seed));
    let [q_weight, k_weight, bias] = [4, 5, 6].map(|seed| numbers(2 * WIDTH, seed));
    for size in [WIDTH, 2 * WIDTH] {
        let is_layer = size > WIDTH; // of all heads together
        let normalised = |x: &[f32], weight: &dyn Fn(usize) -> f32| -> Vec<f32> {
            let of_row = |row: &[f32]| {
                let mean = if is_layer { row.iter().sum::<f32>() / size as f32 } else { 0.0 };
                let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / size as f32;
                let one = |(i, x): (usize, &f32)| {
                    (x - mean) / (square + 1e-5).sqrt() * weight(i)
                        + if is_layer { bias[i] } else { 0.0 }
                };
                row.iter().enumerate().map(one).collect::<Vec<_>>()
            };
            x.chunks(size).flat_map(of_row).collect()
        };
        let norm = if is_layer {
            Norm::layer(1e-5).q_bias(&bias).k_bias(&bias).all_heads()
        } else {
            Norm::rms(1e-5).values()
        };
        let norm = norm.q_weight(&q_weight[..size]).k_weight(&k_weight[..size]);
        let v_rows = if is_layer { v.clone() } else { normalised(&v, &|_| 1.0) };
        let expected = attend(
            &normalised(&q, &|i| q_weight[i]),
            &normalised(&k, &|i| k_weight[i]),
            &v_rows,
            None,
        );
        assert_near(&attend(&q, &k, &v, Some(norm)), &expected, 1e-5);
    }
}

#[test]
fn a_layer_normalises_what_it_projects_and_stores() {
    let (layer, x, weight) = (layer(), numbers(3 * 32, 1), numbers(WIDTH, 2));
    let tables = RopeConfig::new(WIDTH).tables(3).unwrap();
    let norm = Norm::rms(1e-6).k_weight(&weight).after_rope();
    let (mut y, mut q, mut k, mut v, mut context) =
        ([0.0; 96], [0.0; 96], [0.0; 48], [0.0; 48], [0.0; 96]);
    let outputs = Outputs::new().q(&mut q).k(&mut k).v(&mut v).context(&mut context);
    layer.forward(&x, &mut y).causal().rope(&tables).norm(norm).outputs(outputs).done();

    let mut output = [0.0; 96];
    let attention = Attention::new(4, WIDTH).num_kv_heads(2);
    attention.call(&q, &mut output).key_value(&k, &v).causal().rope(&tables).norm(norm).done();
    assert_eq!(bits(&output), bits(&context));

    let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 16)).unwrap();
    for row in 0..3 {
        let mut token = [0.0; 32];
        let call =
            layer.forward(&x[row * 32..][..32], &mut token).causal().rope(&tables).norm(norm);
        call.cache(&mut cache).done();
        assert_eq!(bits(&token), bits(&y[row * 32..][..32]));
    }
}

#[test]
fn a_norm_of_the_context_comes_before_the_output_projection() {
    // Of the output context, in the rows that W_O takes: those of mha_linear, with the same bits
    // but for the order of the norm's sums.
    let (layer, x) = (layer(), numbers(3 * 32, 1));
    let [weight, bias] = [2, 3].map(|seed| numbers(32, seed));
    let (mut y, mut context) = ([0.0; 96], [0.0; 96]);
    let norm = Norm::of_context(ContextNorm::layer(1e-5).all_heads().weight(&weight).bias(&bias));
    layer.forward(&x, &mut y).norm(norm).outputs(Outputs::new().context(&mut context)).done();
    for row in context.chunks_mut(32) {
        let mean = row.iter().sum::<f32>() / 32.0;
        let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 32.0;
        for (i, x) in row.iter_mut().enumerate() {
            *x = (*x - mean) / (square + 1e-5).sqrt() * weight[i] + bias[i];
        }
    }
    let mut expected = [0.0; 96];
    layer.linear(&context, &mut expected).done();
    assert_near(&y, &expected, 1e-4);

    let mut output = [0.0; 48];
    let [q, k, v] = [4, 5, 6].map(|seed| numbers(48, seed));
    let alone = Norm::rms(1e-6).context(ContextNorm::rms(1e-6).after_gate());
    let call = Attention::new(2, WIDTH).call(&q, &mut output).key_value(&k, &v).norm(alone);
    let sentence = call.refused(ErrorKind::InvalidValue);
    assert!(sentence.starts_with("norm.context_epsilon is 1e-06, but "), "{sentence}");
}
