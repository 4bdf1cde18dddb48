//! Products alone, and rows of 16 bits.

use mha::{
    AlignedBuffer, Attention, Elements, ElementsMut, ErrorKind, Layer, LayerConfig, Type, Weights,
};

use crate::support::{error_of, numbers, Alone};

/// Those that bf16 holds, which are the upper halves of floats.
fn halves(x: &[f32]) -> (Vec<u16>, Vec<f32>) {
    let bits: Vec<u16> = x.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let wide = bits.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect();
    (bits, wide)
}

#[test]
fn a_product_is_that_of_the_matrix() {
    let (x, w, b) = (numbers(5 * 6, 7), numbers(6 * 4, 7), numbers(4, 7));
    let layer =
        Layer::new(&LayerConfig::linear(6, 4), &Weights::linear(&w).output_bias(&b)).unwrap();
    let mut y = vec![0.0; 20];
    layer.linear(&x, &mut y).done();
    for (i, y) in y.iter().enumerate() {
        let sum: f32 = (0..6).map(|k| x[i / 4 * 6 + k] * w[k * 4 + i % 4]).sum();
        assert!((y - sum - b[i % 4]).abs() < 1e-5);
    }
    let mut twice = y.clone();
    layer.linear(&x, &mut twice).add_to_output().done();
    let mut beside = vec![0.0; 20];
    layer.linear(&x, &mut beside).residual(&y).done();
    let sums: Vec<f32> = y.iter().map(|y| y + y).collect();
    assert_eq!((twice, beside), (sums.clone(), sums));
    let info = layer.linear(&x, &mut [0.0; 20]).residual(&y).info().unwrap();
    assert_eq!((info.operations, info.bytes), (2 * 5 * 6 * 4, 4 * (6 * 48 + 48 + 5 * (6 + 4 + 4))));
    let packed: AlignedBuffer =
        Layer::pack(&LayerConfig::linear(6, 4), &Weights::linear(&w).output_bias(&b)).unwrap();
    let mut spread = vec![0.0; 4 * 7 + 4];
    let view = Layer::from_packed(packed).unwrap();
    view.linear(&x, &mut spread).strides(5, 0, 0, 7).done();
    assert_eq!(spread[7..11], y[4..8]);
    view.forward(&x, &mut y).refused(ErrorKind::InvalidValue);
}

#[test]
fn a_product_checks_its_slices() {
    let (x, w) = (numbers(5 * 6, 7), numbers(6 * 4, 7));
    let config = LayerConfig::linear(6, 4);
    let short = Layer::new(&config, &Weights::linear(&w[..23]));
    assert_eq!(
        error_of(short, ErrorKind::SliceLength),
        "w_o has 23 elements; [query_dim 6, output_dim 4] are 24"
    );
    let layer = Layer::new(&config, &Weights::linear(&w)).unwrap();
    let run = |x: &[f32], y: &mut [f32]| layer.linear(x, y).alone();
    error_of(run(&x[..29], &mut [0.0; 20]), ErrorKind::SliceLength);
    error_of(run(&x, &mut [0.0; 19]), ErrorKind::SliceLength);
    let mut y = [0.0; 20];
    layer.linear(&x, &mut y).residual(&x[..19]).refused(ErrorKind::SliceLength);
    layer.linear(&x, &mut y).residual(Elements::F16(&[0; 20])).refused(ErrorKind::InvalidValue);
    layer.linear(&x, &mut y).strides(5, 7, 0, 0).refused(ErrorKind::SliceLength);
    layer.linear(Elements::Int8(&[0; 30]), &mut y).refused(ErrorKind::InvalidValue);
    assert_eq!(y, [0.0; 20]);
}

#[test]
fn rows_of_16_bits_are_the_floats_that_they_widen_to() {
    let (bits, wide) = halves(&numbers(3 * 8, 7));
    let layer = Layer::new(
        &LayerConfig::new(8, 2).weight_type(Type::Bf16),
        &Weights::fused(&numbers(8 * 24, 7)),
    )
    .unwrap();
    let (mut expected, mut y, mut narrow) = (vec![0.0; 24], vec![0.0; 24], vec![0; 24]);
    layer.forward(&wide, &mut expected).done();
    layer.forward(Elements::Bf16(&bits), &mut y).done();
    assert_eq!(y, expected);
    layer.forward(Elements::Bf16(&bits), ElementsMut::Bf16(&mut narrow)).done();
    assert!(expected.iter().zip(&narrow).all(|(y, bits)| (y - f32::from_bits(
        u32::from(*bits) << 16
    ))
    .abs()
        <= y.abs() / 256.0));
    let attention = Attention::new(2, 4);
    let (q, mut of_halves) = (Elements::Bf16(&bits), vec![0; 24]);
    attention.call(q, ElementsMut::Bf16(&mut of_halves)).key_value(q, q).done();
    attention.call(&wide, &mut y).key_value(&wide, &wide).done();
    assert!(y
        .iter()
        .zip(&of_halves)
        .all(|(y, bits)| (y - f32::from_bits(u32::from(*bits) << 16)).abs() <= y.abs() / 256.0));
    let mixed = layer.forward(Elements::Bf16(&bits), &mut y).key(&wide).alone();
    let sentence = error_of(mixed, ErrorKind::InvalidValue);
    assert!(sentence.starts_with("key.type is "), "{sentence}");
    let codes = layer.forward(Elements::Int8(&[0; 24]), &mut y).alone();
    error_of(codes, ErrorKind::InvalidValue);
}
