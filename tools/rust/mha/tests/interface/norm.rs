use mha::{Attention, CacheConfig, KvCache, Norm, RopeConfig, Taps, Workspace};

use crate::support::{assert_near, bits, layer, numbers};

const WIDTH: usize = 8;

fn attend(q: &[f32], k: &[f32], v: &[f32], norm: Option<Norm<'_>>) -> Vec<f32> {
    let mut output = vec![f32::NAN; q.len()];
    let call = Attention::new(2, WIDTH).call(q, &mut output).key_value(k, v);
    let call = if let Some(norm) = norm { call.norm(norm) } else { call };
    call.run(&mut Workspace::new()).unwrap();
    output
}

/// Rows of two heads.
fn normalised(x: &[f32], together: usize, is_layer: bool, weight: &[f32], bias: &[f32]) -> Vec<f32> {
    let size = together * WIDTH;
    let of_row = |row: &[f32]| {
        let mean = if is_layer { row.iter().sum::<f32>() / size as f32 } else { 0.0 };
        let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / size as f32;
        row.iter().enumerate().map(|(i, x)| (x - mean) / (square + 1e-5).sqrt() * weight[i] + bias[i]).collect::<Vec<_>>()
    };
    x.chunks(size).flat_map(of_row).collect()
}

#[test]
fn norms_are_their_formulas() {
    let [q, k, v] = [1, 2, 3].map(|seed| numbers(5 * 2 * WIDTH, seed));
    let [q_weight, k_weight, bias] = [4, 5, 6].map(|seed| numbers(2 * WIDTH, seed));
    let (none, ones) = (vec![0.0; 2 * WIDTH], vec![1.0; 2 * WIDTH]);

    let rms = Norm::rms(1e-5).q_weight(&q_weight[..WIDTH]).k_weight(&k_weight[..WIDTH]).values();
    let (q_rows, k_rows) = (normalised(&q, 1, false, &q_weight, &none), normalised(&k, 1, false, &k_weight, &none));
    let expected = attend(&q_rows, &k_rows, &normalised(&v, 1, false, &ones, &none), None);
    assert_near(&attend(&q, &k, &v, Some(rms)), &expected, 1e-5);

    let layer = Norm::layer(1e-5).q_weight(&q_weight).k_weight(&k_weight).q_bias(&bias).k_bias(&bias).all_heads();
    let expected = attend(&normalised(&q, 2, true, &q_weight, &bias), &normalised(&k, 2, true, &k_weight, &bias), &v, None);
    assert_near(&attend(&q, &k, &v, Some(layer)), &expected, 1e-5);
}

#[test]
fn a_layer_normalises_what_it_projects_and_stores() {
    let (layer, x, weight) = (layer(), numbers(3 * 32, 1), numbers(WIDTH, 2));
    let tables = RopeConfig::new(WIDTH).tables(3).unwrap();
    let norm = Norm::rms(1e-6).k_weight(&weight).after_rope();
    let (mut y, mut q, mut k, mut v, mut context) = ([0.0; 96], [0.0; 96], [0.0; 48], [0.0; 48], [0.0; 96]);
    let taps = Taps::new().q(&mut q).k(&mut k).v(&mut v).context(&mut context);
    layer.forward(&x, &mut y).causal().rope(&tables).norm(norm).taps(taps).run(&mut Workspace::new()).unwrap();

    let mut output = [0.0; 96];
    let attention = Attention::new(4, WIDTH).num_kv_heads(2);
    attention.call(&q, &mut output).key_value(&k, &v).causal().rope(&tables).norm(norm).run(&mut Workspace::new()).unwrap();
    assert_eq!(bits(&output), bits(&context));

    let mut cache = KvCache::new(&CacheConfig::for_layer(layer.shape(), 16)).unwrap();
    for row in 0..3 {
        let mut token = [0.0; 32];
        let call = layer.forward(&x[row * 32..][..32], &mut token).causal().rope(&tables).norm(norm);
        call.cache(&mut cache).run(&mut Workspace::new()).unwrap();
        assert_eq!(bits(&token), bits(&y[row * 32..][..32]));
    }
}
