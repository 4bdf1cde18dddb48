use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use mha_candle::mha::{
    self, Arithmetic, Layer, LayerConfig, Type, WeightLayout, Weights, Workspace,
};
use mha_candle::LinearConfig;

use crate::support::{assert_near, bits, difference, numbers, sentence, tensor};

const INPUTS: usize = 96;
const OUTPUTS: usize = 40;

fn linear() -> candle_nn::Linear {
    candle_nn::Linear::new(
        (tensor(1, &[OUTPUTS, INPUTS]) * 0.2).unwrap(),
        Some(tensor(2, &[OUTPUTS])),
    )
}

/// By the crate mha, without candle.
fn expected(config: &LayerConfig, x: &Tensor) -> Vec<u32> {
    let (weight, bias, rows) =
        (numbers(linear().weight()), numbers(linear().bias().unwrap()), numbers(x));
    let layer = Layer::new(
        config,
        &Weights::linear(&weight).layout(WeightLayout::OutIn).output_bias(&bias),
    )
    .unwrap();
    let mut y = vec![0.0; rows.len() / INPUTS * OUTPUTS];
    layer.linear(&rows, &mut y).run(&mut Workspace::new()).unwrap();
    y.into_iter().map(f32::to_bits).collect()
}

fn all() -> impl Iterator<Item = (LinearConfig, LayerConfig)> {
    let (f32, int8, int4) = (Type::F32, Type::Int8, Type::Int4);
    let others = [
        (int8, Arithmetic::Int8),
        (int8, Arithmetic::Int16),
        (int4, Arithmetic::Int8),
        (int4, Arithmetic::Int16),
        (Type::Bf16, Arithmetic::Bf16),
    ];
    [(f32, Arithmetic::F32), (Type::F16, Arithmetic::F32), (int8, Arithmetic::F32)]
        .into_iter()
        .chain(others)
        .map(|(kind, arithmetic)| {
            let config =
                LayerConfig::linear(INPUTS, OUTPUTS).weight_type(kind).arithmetic(arithmetic);
            (LinearConfig::new().weight_type(kind).arithmetic(arithmetic), config)
        })
}

#[test]
fn rows_of_any_shape_and_strides_have_the_bits_of_the_library() -> Result<()> {
    let rows = [
        tensor(5, &[7, INPUTS]),
        tensor(5, &[INPUTS]),
        tensor(5, &[1, INPUTS]),
        tensor(5, &[2, 3, INPUTS]),
        tensor(5, &[2, 2, 3, INPUTS]),
        tensor(5, &[3, 2, INPUTS]).transpose(0, 1)?,
        tensor(5, &[7, INPUTS + 9]).narrow(1, 4, INPUTS)?,
        tensor(5, &[3, 5, INPUTS + 9]).narrow(1, 1, 3)?.narrow(2, 4, INPUTS)?,
        tensor(5, &[INPUTS, 7]).t()?,
        tensor(5, &[1, INPUTS]).broadcast_as((6, INPUTS))?,
    ];
    for (config, same) in all() {
        let layer = config.build(&linear())?;
        assert_eq!(layer.layer().shape().arithmetic, same.arithmetic);
        for x in &rows {
            let y = layer.forward(x)?;
            assert_eq!(
                (&y.dims()[..x.rank() - 1], y.dims()[x.rank() - 1]),
                (&x.dims()[..x.rank() - 1], OUTPUTS)
            );
            assert_eq!(bits(&y), expected(&same, x), "{config:?} {:?} {:?}", x.dims(), x.stride());
        }
    }
    Ok(())
}

#[test]
fn candles_own_agrees_and_types_are_those_of_the_rows() -> Result<()> {
    let x = tensor(7, &[5, INPUTS]);
    let wanted = linear().forward(&x)?;
    for ((config, _), tolerance) in all().zip([1e-6, 1e-3, 3e-2, 3e-2, 3e-2, 0.4, 0.4, 3e-2]) {
        let apart = difference(&config.build(&linear())?.forward(&x)?, &wanted);
        assert!(apart <= tolerance, "{config:?}: {apart}");
    }
    for (dtype, kind, tolerance) in [(DType::F16, Type::F16, 3e-3), (DType::BF16, Type::Bf16, 3e-2)]
    {
        let tensors =
            [("weight", linear().weight().clone()), ("bias", linear().bias().unwrap().clone())];
        let vb = VarBuilder::from_tensors(
            tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into(),
            dtype,
            &Device::Cpu,
        );
        let layer = LinearConfig::new().load(INPUTS, OUTPUTS, vb)?;
        assert_eq!(layer.layer().shape().weight_type, kind);
        let y = layer.forward(&x.to_dtype(dtype)?)?;
        assert_eq!(y.dtype(), dtype);
        assert_near(&y, &wanted, tolerance);
        assert_near(&layer.forward(&x)?, &wanted, tolerance);
    }
    let no_bias = candle_nn::Linear::new(linear().weight().clone(), None);
    assert_near(&LinearConfig::new().build(&no_bias)?.forward(&x)?, &no_bias.forward(&x)?, 1e-6);
    Ok(())
}

#[test]
fn what_would_not_be_computed_is_refused() -> Result<()> {
    let var = Var::from_tensor(&tensor(8, &[3, INPUTS]))?;
    let gradient = "x needs a gradient, which mha does not compute: detach() it, or load weights \
        that are no Var";
    assert_eq!(sentence(LinearConfig::new().build(&linear())?.forward(&var)), gradient);
    let doubles = candle_nn::Linear::new(linear().weight().to_dtype(DType::F64)?, None);
    let of_type = "the layer is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype";
    assert_eq!(sentence(LinearConfig::new().build(&doubles)), of_type);

    let tensors = [
        ("up_proj.weight", linear().weight().clone()),
        ("up_proj.lora_A.weight", tensor(1, &[4, INPUTS])),
    ];
    let vb = VarBuilder::from_tensors(
        tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into(),
        DType::F32,
        &Device::Cpu,
    );
    let adapter = sentence(LinearConfig::new().load(INPUTS, OUTPUTS, vb.pp("up_proj")));
    let merge = "merge it into the weight, or leave this layer to candle";
    assert_eq!(
        adapter,
        format!("the weights have up_proj.lora_A.weight, which would not be used: {merge}")
    );
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error_with_a_sentence() {
    let layer = LinearConfig::new().build(&linear()).unwrap();
    assert_eq!(
        sentence(layer.forward(&tensor(1, &[2, 40]))),
        "x is [2, 40]; its last dimension must be 96"
    );
    let one = Tensor::new(1f32, &Device::Cpu).unwrap();
    assert_eq!(sentence(layer.forward(&one)), "x is []; its last dimension must be 96");
    let wrong = candle_nn::Linear::new(linear().weight().clone(), Some(tensor(2, &[41])));
    assert_eq!(
        sentence(LinearConfig::new().build(&wrong)),
        "the layer is [40, 96] with the bias Some([41]); it must be [40, 96]"
    );
    let floats = sentence(LinearConfig::new().arithmetic(mha::Arithmetic::Int8).build(&linear()));
    assert!(floats.contains("needs integer weights, but weight_type is"), "{floats}");
    let bf16 = LinearConfig::new().arithmetic(mha::Arithmetic::Bf16);
    let floats = sentence(bf16.build(&linear()));
    assert!(floats.contains("BF16 (1283), but weight_type is 1"), "{floats}");
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    assert_eq!(LinearConfig::new().load(8, 4, vb).unwrap().layer().shape().output_dim, 4);
}
