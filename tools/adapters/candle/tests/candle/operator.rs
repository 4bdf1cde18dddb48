use candle_core::{DType, Device, Result, Tensor, Var};
use mha_candle::{flash_attn, sdpa, Attention};

use crate::support::{assert_near, bias_where, bits, numbers, plain_attention, sentence, tensor};

/// batch, heads, kv_heads, rows, keys, head_dim, head_dim_v
const SHAPES: [[usize; 7]; 7] = [
    [1, 1, 1, 1, 1, 4, 4],
    [1, 4, 4, 7, 7, 8, 8],
    [2, 6, 2, 5, 9, 16, 8],
    [3, 4, 1, 1, 33, 64, 64],
    [1, 8, 2, 40, 40, 64, 64],
    [2, 3, 3, 17, 130, 24, 40],
    [8, 2, 1, 3, 20, 128, 128],
];

fn inputs([batch, heads, kv_heads, rows, keys, width, width_v]: [usize; 7]) -> [Tensor; 3] {
    [
        tensor(1, &[batch, heads, rows, width]),
        tensor(2, &[batch, kv_heads, keys, width]),
        tensor(3, &[batch, kv_heads, keys, width_v]),
    ]
}

#[test]
fn it_agrees_with_candles_operations() -> Result<()> {
    for shape in SHAPES {
        let [q, k, v] = inputs(shape);
        let [_, _, _, rows, keys, width, _] = shape;
        let (scale, offset) = (1.0 / (width as f64).sqrt(), keys - rows);
        let plain = plain_attention(&q, &k, &v, scale, None, None)?;
        assert_near(&Attention::new().forward(&q, &k, &v)?, &plain, 2e-6);

        let causal = bias_where(rows, keys, offset, |query, key| key <= query);
        let expected = plain_attention(&q, &k, &v, scale, None, Some(&causal))?;
        assert_near(&Attention::new().causal().forward(&q, &k, &v)?, &expected, 2e-6);

        let window =
            bias_where(rows, keys, offset, |query, key| key <= query + 1 && key + 3 >= query);
        let expected = plain_attention(&q, &k, &v, 0.3, Some(2.0), Some(&window))?;
        let attention = Attention::new().window_left(3).window_right(1).softcap(2.0).scale(0.3);
        assert_near(&attention.forward(&q, &k, &v)?, &expected, 3e-6);
    }
    Ok(())
}

#[test]
fn functions_with_candles_parameters_are_the_same_calls() -> Result<()> {
    let [q, k, v] = inputs([2, 6, 2, 5, 9, 16, 16]);
    let causal = Attention::new().causal().scale(0.25).forward(&q, &k, &v)?;
    assert_eq!(bits(&sdpa(&q, &k, &v, None, true, 0.25, 1.0)?), bits(&causal));
    let rows_first = |tensor: &Tensor| tensor.transpose(1, 2);
    let flash = flash_attn(&rows_first(&q)?, &rows_first(&k)?, &rows_first(&v)?, 0.25, true)?;
    assert_eq!(flash.dims(), [2, 5, 6, 16]);
    assert_eq!(bits(&flash.transpose(1, 2)?), bits(&causal));

    let bias = tensor(5, &[1, 1, 5, 9]);
    let capped = Attention::new().scale(0.25).softcap(3.0).bias(&bias).forward(&q, &k, &v)?;
    assert_eq!(bits(&sdpa(&q, &k, &v, Some(&bias), false, 0.25, 3.0)?), bits(&capped));
    Ok(())
}

#[test]
fn views_give_the_bits_of_what_they_show() -> Result<()> {
    let shape = [2, 4, 2, 6, 11, 16, 16];
    let [q, k, v] = inputs(shape);
    let expected = bits(&Attention::new().causal().forward(&q, &k, &v)?);
    let of = |q: &Tensor, k: &Tensor, v: &Tensor| {
        bits(&Attention::new().causal().forward(q, k, v).unwrap())
    };

    // [batch, rows, heads, width] in memory
    let transposed = |tensor: &Tensor| tensor.transpose(1, 2)?.contiguous()?.transpose(1, 2);
    assert_eq!(of(&transposed(&q)?, &transposed(&k)?, &transposed(&v)?), expected);
    // A part of something larger
    let part = |tensor: &Tensor| {
        Tensor::cat(&[tensor, &tensor.ones_like()?, tensor], 2)?.narrow(2, 0, tensor.dim(2)?)
    };
    assert_eq!(of(&part(&q)?, &part(&k)?, &part(&v)?), expected);
    let wider =
        |tensor: &Tensor| Tensor::cat(&[&tensor.zeros_like()?, tensor], 3)?.narrow(3, 16, 16);
    assert_eq!(of(&wider(&q)?, &wider(&k)?, &wider(&v)?), expected);
    // With a last dimension that is not contiguous: copied
    let turned = |tensor: &Tensor| tensor.t()?.contiguous()?.t();
    assert_eq!(of(&turned(&q)?, &turned(&k)?, &turned(&v)?), expected);

    // One sequence and one head for all
    let (one_k, one_v) = (k.narrow(0, 0, 1)?.narrow(1, 0, 1)?, v.narrow(0, 0, 1)?.narrow(1, 0, 1)?);
    let everywhere = |tensor: &Tensor| tensor.broadcast_as((2, 2, 11, 16));
    let (k_copies, v_copies) =
        (everywhere(&one_k)?.contiguous()?, everywhere(&one_v)?.contiguous()?);
    assert_eq!(of(&q, &everywhere(&one_k)?, &everywhere(&one_v)?), of(&q, &k_copies, &v_copies));
    Ok(())
}

#[test]
fn masks_and_biases_broadcast() -> Result<()> {
    let [q, k, v] = inputs([2, 4, 2, 5, 9, 16, 16]);
    for shape in [
        vec![9],
        vec![5, 9],
        vec![1, 5, 9],
        vec![4, 1, 9],
        vec![2, 1, 1, 9],
        vec![2, 4, 5, 9],
        vec![1, 1, 5, 1],
    ] {
        let bias = tensor(7, &shape);
        let expected = plain_attention(&q, &k, &v, 0.25, None, Some(&bias))?;
        assert_near(&Attention::new().bias(&bias).forward(&q, &k, &v)?, &expected, 2e-6);
        for dtype in [DType::F16, DType::BF16] {
            let (bias, rounded) =
                (bias.to_dtype(dtype)?, bias.to_dtype(dtype)?.to_dtype(DType::F32)?);
            let expected = Attention::new().bias(&rounded).forward(&q, &k, &v)?;
            assert_eq!(bits(&Attention::new().bias(&bias).forward(&q, &k, &v)?), bits(&expected));
        }
        let mask = tensor(8, &shape).ge(-1f32)?; // a quarter out
        let bias = mask.where_cond(
            &mask.zeros_like()?.to_dtype(DType::F32)?,
            &Tensor::new(f32::NEG_INFINITY, &Device::Cpu)?.broadcast_as(shape)?,
        )?;
        let expected = Attention::new().bias(&bias).forward(&q, &k, &v)?;
        assert!(numbers(&expected).iter().any(|number| *number != 0.0));
        assert_eq!(bits(&Attention::new().mask(&mask).forward(&q, &k, &v)?), bits(&expected));
        assert_eq!(
            bits(&Attention::new().masked_out(&mask.eq(0u8)?)?.forward(&q, &k, &v)?),
            bits(&expected)
        );
    }
    Ok(())
}

#[test]
fn a_part_of_a_mask_or_bias_is_what_it_shows() -> Result<()> {
    let [q, k, v] = inputs([2, 4, 2, 5, 9, 16, 16]);
    let large = tensor(7, &[2, 4, 12, 20]);
    let part = large.narrow(2, 3, 5)?.narrow(3, 6, 9)?;
    let expected = bits(&Attention::new().bias(&part.contiguous()?).forward(&q, &k, &v)?);
    assert_eq!(bits(&Attention::new().bias(&part).forward(&q, &k, &v)?), expected);
    let mask = large.ge(0f32)?.narrow(2, 3, 5)?.narrow(3, 6, 9)?;
    let expected = bits(&Attention::new().mask(&mask.contiguous()?).forward(&q, &k, &v)?);
    assert_eq!(bits(&Attention::new().mask(&mask).forward(&q, &k, &v)?), expected);
    Ok(())
}

#[test]
fn halves_are_read_and_written_as_they_are() -> Result<()> {
    for (dtype, tolerance) in [(DType::F16, 5e-4), (DType::BF16, 4e-3)] {
        let [q, k, v] = inputs([2, 4, 2, 5, 9, 32, 32]);
        let half = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let float = |tensor: &Tensor| half(tensor).to_dtype(DType::F32).unwrap();
        let y = Attention::new().causal().forward(&half(&q), &half(&k), &half(&v))?;
        assert_eq!(y.dtype(), dtype);
        let of_floats = Attention::new().causal().forward(&float(&q), &float(&k), &float(&v))?;
        assert_eq!(bits(&y), bits(&half(&of_floats))); // rounded once, at the end
        assert_near(
            &y,
            &plain_attention(
                &q,
                &k,
                &v,
                32f64.powf(-0.5),
                None,
                Some(&bias_where(5, 9, 4, |query, key| key <= query)),
            )?,
            8.0 * tolerance,
        );
        // Keys and values of another type than the queries
        let mixed = Attention::new().causal().forward(&float(&q), &half(&k), &half(&v))?;
        assert_eq!((mixed.dtype(), bits(&mixed)), (DType::F32, bits(&of_floats)));
    }
    Ok(())
}

#[test]
fn alibi_and_sinks_are_those_of_their_formulas() -> Result<()> {
    let [q, k, v] = inputs([2, 4, 2, 5, 9, 16, 8]);
    let slopes = mha_candle::mha::alibi_slopes(4).unwrap();
    let distances = |head: usize| {
        (0..5).flat_map(move |row| (0..9).map(move |key| (head, (row + 4_i32 - key).abs() as f32)))
    };
    let numbers: Vec<f32> =
        (0..4).flat_map(distances).map(|(head, distance)| -slopes[head] * distance).collect();
    let expected = plain_attention(
        &q,
        &k,
        &v,
        0.25,
        None,
        Some(&Tensor::from_vec(numbers, (4, 5, 9), &Device::Cpu)?),
    )?;
    assert_near(&Attention::new().alibi_slopes(&slopes).forward(&q, &k, &v)?, &expected, 2e-6);

    // A sink is a key of zeros with this score, and a value of zeros.
    let zeros = |tensor: &Tensor| tensor.pad_with_zeros(2, 0, 1);
    let bias = Tensor::new(&[0f32, 0., 0., 0., 0., 0., 0., 0., 0., 0.7], &Device::Cpu)?;
    let expected = plain_attention(&q, &zeros(&k)?, &zeros(&v)?, 0.25, None, Some(&bias))?;
    assert_near(&Attention::new().sinks(&[0.7; 4]).forward(&q, &k, &v)?, &expected, 2e-6);
    let mean = plain_attention(&q, &k, &v, 0.0, None, None)?;
    assert_near(&Attention::new().scale(0.0).forward(&q, &k, &v)?, &mean, 2e-6);
    Ok(())
}

#[test]
fn what_mha_does_not_compute_is_refused() -> Result<()> {
    let [q, k, v] = inputs([2, 4, 2, 5, 9, 16, 8]);
    let said = |attention: Attention, q: &Tensor, k: &Tensor| sentence(attention.forward(q, k, &v));
    assert_eq!(
        said(Attention::new(), &q.to_dtype(DType::F64)?, &k),
        "q is of F64, but mha takes f32, f16 and bf16: convert it by to_dtype"
    );
    let gradient = "k needs a gradient, which mha does not compute: detach() it, or load weights \
        that are no Var";
    assert_eq!(said(Attention::new(), &q, Var::from_tensor(&k)?.as_tensor()), gradient);
    let not_u8 = tensor(1, &[5, 9]);
    let mask =
        "mask is of F32; make it u8, 0 where a key takes no part, or pass numbers to add as \
        the bias";
    assert_eq!(said(Attention::new().mask(&not_u8), &q, &k), mask);
    let of_bytes = "bias is of U8, but mha takes f32, f16 and bf16: convert it by to_dtype";
    assert_eq!(said(Attention::new().bias(&not_u8.ge(0f32)?), &q, &k), of_bytes);
    Ok(())
}

#[test]
fn what_does_not_fit_together_is_an_error_with_a_sentence() {
    let [q, k, v] = inputs([2, 4, 2, 5, 9, 16, 8]);
    let said = |attention: Attention, q: &Tensor, k: &Tensor, v: &Tensor| {
        sentence(attention.forward(q, k, v))
    };
    let flat = said(Attention::new(), &q.narrow(0, 0, 1).unwrap().squeeze(0).unwrap(), &k, &v);
    assert_eq!(
        flat,
        "q is [4, 5, 16], k [2, 2, 9, 16] and v [2, 2, 9, 8]; attention takes [batch, \
        heads, rows, head_dim]"
    );
    assert!(said(Attention::new(), &q, &v, &k).contains("k has the batch and head_dim of q"));
    let heads = said(Attention::new(), &q.narrow(1, 0, 3).unwrap(), &k, &v);
    assert!(heads.contains("num_kv_heads 2") && heads.contains("num_heads 3"), "{heads}");
    assert_eq!(
        said(Attention::new().sinks(&[1.0; 3]), &q, &k, &v),
        "sinks has 3 elements; [num_heads 4] are 4"
    );
    let wrong = tensor(1, &[5, 8]);
    assert_eq!(
        said(Attention::new().bias(&wrong), &q, &k, &v),
        "a mask or bias is [5, 8]; it must broadcast to [batch, heads, rows, keys], [2, 4, 5, 9]"
    );
    let softcap = said(Attention::new().softcap(-1.0), &q, &k, &v);
    assert!(softcap.contains("softcap is -1"), "{softcap}");
}
