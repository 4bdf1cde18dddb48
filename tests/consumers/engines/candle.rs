//! Llama of candle-transformers as it is published, and as candle.patch makes it, with the same
//! random weights: the tokens that both generate, and with ROUNDS, in turns, the seconds that they
//! take, beside candle's quantised Llama of the same weights. Says the seconds as JSON.
//!
//!     engine [ROUNDS]      on RAYON_NUM_THREADS threads

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;
use std::time::Instant;

use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::{llama as published, quantized_llama as quantized};
use patched_transformers::models::{llama as patched, mha::Arithmetic};

/// A Llama with random weights, known to both crates by the JSON of its configuration.
struct Llama {
    json: String,
    config: published::Config,
    weights: HashMap<String, Tensor>,
}

fn llama([width, layers, heads, kv_heads, inner, vocabulary]: [usize; 6], more: &str) -> Llama {
    let json = format!(
        r#"{{"hidden_size": {width}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
              "num_key_value_heads": {kv_heads},
             "intermediate_size": {inner}, "vocab_size": {vocabulary}, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 1024{more}}}"#
    );
    let config: published::LlamaConfig = serde_json::from_str(&json).expect("a configuration");
    let config = config.into_config(false);
    Llama { json, weights: random_weights(&config).expect("weights"), config }
}

/// Numbers between -1 and 1.
fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count).map(move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    })
}

/// The tensors that a published model has variables for, of numbers that follow from their names.
fn random_weights(config: &published::Config) -> Result<HashMap<String, Tensor>> {
    let map = VarMap::new();
    published::Llama::load(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu), config)?;
    let variables = map.data().lock().expect("no other thread");
    let random_tensor = |(name, variable): (&String, &Var)| {
        let (around, scale) = match variable.dims() {
            [_] => (1.0, 0.3), // of a norm
            _ if name.contains("embed_tokens") => (0.0, 1.0),
            shape => (0.0, 1.7 / (shape[1] as f32).sqrt()),
        };
        let seed = name.bytes().fold(17, |seed: u64, byte| seed.wrapping_mul(31) ^ u64::from(byte));
        let numbers = random(seed, variable.elem_count()).map(|number| around + scale * number);
        let tensor = Tensor::from_vec(numbers.collect(), variable.dims(), &Device::Cpu)?;
        Ok((name.clone(), tensor))
    };
    variables.iter().map(random_tensor).collect()
}

impl Llama {
    fn var_builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.weights.clone(), DType::F32, &Device::Cpu)
    }
}

/// A model by what it answers: the logits of the last token behind the tokens of a call, which
/// begin at this position.
type Model<'a> = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor> + 'a>;

fn of_published(llama: &Llama) -> Result<Model<'_>> {
    let model = published::Llama::load(llama.var_builder(), &llama.config)?;
    let new_cache = || published::Cache::new(true, DType::F32, &llama.config, &Device::Cpu);
    let mut cache = new_cache()?;
    Ok(Box::new(move |tokens, position| {
        if position == 0 {
            cache = new_cache()?;
        }
        model.forward(tokens, position, &mut cache)
    }))
}

fn of_mha(llama: &Llama, int8: Option<Arithmetic>) -> Result<Model<'_>> {
    let config: patched::LlamaConfig = serde_json::from_str(&llama.json).expect("a configuration");
    let config = config.into_config(false);
    let model = patched::Llama::load_packed(llama.var_builder(), &config, int8)?;
    let mut cache = patched::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
    // The cache of mha forgets by itself what lies behind a position.
    Ok(Box::new(move |tokens, position| model.forward(tokens, position, &mut cache)))
}

/// candle's int8: the same weights as Q8_0, in a GGUF file as its quantised Llama reads it.
fn of_q8_0(llama: &Llama) -> Result<Model<'_>> {
    let config = &llama.config;
    let (width, inner, head) = (
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size / config.num_attention_heads,
    );
    let kv = head * config.num_key_value_heads;
    let mut names = vec![
        (
            "token_embd.weight".to_owned(),
            "model.embed_tokens.weight".to_owned(),
            vec![config.vocab_size, width],
        ),
        ("output_norm.weight".to_owned(), "model.norm.weight".to_owned(), vec![width]),
        ("output.weight".to_owned(), "lm_head.weight".to_owned(), vec![config.vocab_size, width]),
    ];
    for i in 0..config.num_hidden_layers {
        for (to, from, shape) in [
            ("attn_norm", "input_layernorm", vec![width]),
            ("ffn_norm", "post_attention_layernorm", vec![width]),
            ("attn_q", "self_attn.q_proj", vec![width, width]),
            ("attn_k", "self_attn.k_proj", vec![kv, width]),
            ("attn_v", "self_attn.v_proj", vec![kv, width]),
            ("attn_output", "self_attn.o_proj", vec![width, width]),
            ("ffn_gate", "mlp.gate_proj", vec![inner, width]),
            ("ffn_up", "mlp.up_proj", vec![inner, width]),
            ("ffn_down", "mlp.down_proj", vec![width, inner]),
        ] {
            names.push((
                format!("blk.{i}.{to}.weight"),
                format!("model.layers.{i}.{from}.weight"),
                shape,
            ));
        }
    }
    let vb = llama.var_builder();
    let tensors = names.iter().map(|(to, from, shape)| {
        let kind = if shape.len() == 1 { GgmlDType::F32 } else { GgmlDType::Q8_0 };
        Ok((to.as_str(), QTensor::quantize(&vb.get(shape.as_slice(), from)?, kind)?))
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let number = |number: usize| gguf_file::Value::U32(number as u32);
    let values = [
        // which rotates as published::Llama does
        ("general.architecture", gguf_file::Value::String("qwen2".to_owned())),
        ("llama.attention.head_count", number(config.num_attention_heads)),
        ("llama.attention.head_count_kv", number(config.num_key_value_heads)),
        ("llama.block_count", number(config.num_hidden_layers)),
        ("llama.embedding_length", number(width)),
        ("llama.rope.dimension_count", number(head)),
        (
            "llama.attention.layer_norm_rms_epsilon",
            gguf_file::Value::F32(config.rms_norm_eps as f32),
        ),
        ("llama.rope.freq_base", gguf_file::Value::F32(config.rope_theta)),
    ];
    let mut file = Cursor::new(Vec::new());
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut file, &values.each_ref().map(|(name, value)| (*name, value)), &tensors)?;
    file.set_position(0);
    let content = gguf_file::Content::read(&mut file)?;
    let mut model = quantized::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
    Ok(Box::new(move |tokens, position| model.forward(tokens, position)))
}

struct Run {
    tokens: Vec<Vec<u32>>,
    logits: Vec<f32>, // behind the prompt
    prompt_seconds: f64,
    token_seconds: f64, // the median
}

fn generate(model: &mut Model, prompt: &Tensor, count: usize) -> Result<Run> {
    let (mut next, mut position) = (prompt.clone(), 0);
    let mut run = Run { tokens: vec![], logits: vec![], prompt_seconds: 0.0, token_seconds: 0.0 };
    let mut seconds = vec![];
    for _ in 0..=count {
        let start = Instant::now();
        let logits = model(&next, position)?;
        position += next.dim(1)?;
        next = logits.argmax_keepdim(1)?;
        seconds.push(start.elapsed().as_secs_f64());
        run.tokens.push(next.i((.., 0))?.to_vec1()?);
        if run.logits.is_empty() {
            run.logits = logits.flatten_all()?.to_vec1()?;
        }
    }
    run.prompt_seconds = seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    run.token_seconds = seconds[count / 2];
    Ok(run)
}

fn prompt(batch: usize, rows: usize, vocabulary: usize) -> Result<Tensor> {
    let ids = random(1, batch * rows)
        .map(|number| ((number + 1.0) / 2.0 * vocabulary as f32) as u32 % vocabulary as u32);
    Tensor::from_vec(ids.collect::<Vec<_>>(), (batch, rows), &Device::Cpu)
}

/// Of a model whose tokens are not all the same, as they are where embeddings are random and tied.
fn check(what: &str, expected: &Run, found: &Run, is_tied: bool) {
    let (a, b) = (&expected.tokens, &found.tokens);
    assert_eq!(a, b, "{what}: the patched engine generates other tokens");
    let mut different: Vec<u32> = a.iter().flatten().copied().collect();
    let count = different.len();
    different.sort_unstable();
    different.dedup();
    assert!(
        different.len() > count / 3 || is_tied,
        "{what}: only {} of {count} tokens are different",
        different.len()
    );
    eprintln!(
        "{what}: the same {count} tokens, {} of them different; logits apart by {:.1e}",
        different.len(),
        apart(expected, found)
    );
    assert!(apart(expected, found) < 1e-5);
}

/// The rms difference of the logits behind the prompt, relative to them.
fn apart(expected: &Run, found: &Run) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|value| value * value).sum::<f32>().sqrt()
    };
    norm(&mut expected.logits.iter().zip(&found.logits).map(|(a, b)| a - b))
        / norm(&mut expected.logits.iter().copied())
}

/// In int8 too, where candle's quantised Llama can be the same model; it takes one sequence.
fn compare(what: &str, shape: [usize; 6], more: &str, batch: usize) -> Result<()> {
    let (llama, prompt) = (llama(shape, more), prompt(batch, 40, shape[5])?);
    let run = |mut model: Model, count| generate(&mut model, &prompt, count);
    let expected = run(of_published(&llama)?, 64)?;
    check(what, &expected, &run(of_mha(&llama, None)?, 64)?, llama.config.tie_word_embeddings);
    if more.is_empty() && batch == 1 {
        let (ours, candles) =
            (run(of_mha(&llama, Some(Arithmetic::Int8))?, 1)?, run(of_q8_0(&llama)?, 1)?);
        let (ours, candles) = (apart(&expected, &ours), apart(&expected, &candles));
        eprintln!("{what}, int8: logits apart by {ours:.1e} (mha), {candles:.1e} (candle)");
        assert!(ours.max(candles) < 0.1);
    }
    Ok(())
}

fn main() -> Result<()> {
    let rounds: usize =
        std::env::args().nth(1).map_or(0, |word| word.parse().expect("ROUNDS is a number"));
    if rounds == 0 {
        compare("a model", [256, 4, 8, 8, 512, 1000], "", 1)?;
        compare("shared heads", [256, 4, 8, 2, 512, 1000], "", 1)?;
        compare("shared heads, three sequences", [256, 4, 8, 2, 512, 1000], "", 3)?;
        compare(
            "tied embeddings",
            [256, 2, 4, 1, 512, 1000],
            r#", "tie_word_embeddings": true"#,
            1,
        )?;
        let scaling = r#", "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                           "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 32}"#;
        return compare("scaled rotation", [256, 3, 4, 2, 512, 1000], scaling, 1);
    }
    let (llama, prompt) = (llama([768, 12, 12, 12, 2048, 32000], ""), prompt(1, 512, 32000)?);
    let mut models = [
        ("engine", of_published(&llama)?),
        ("mha", of_mha(&llama, None)?),
        ("engine int8", of_q8_0(&llama)?),
        ("mha int8", of_mha(&llama, Some(Arithmetic::Int8))?),
    ];
    let (mut seconds, mut expected) = (BTreeMap::<_, Vec<f64>>::new(), None);
    for round in 0..=rounds {
        for turn in 0..models.len() {
            let (name, model) = &mut models[(turn + round.saturating_sub(1)) % 4];
            let run = generate(model, &prompt, 32)?;
            if round > 0 {
                seconds
                    .entry(format!("prompt of 512, {name}"))
                    .or_default()
                    .push(run.prompt_seconds);
                seconds.entry(format!("a token, {name}")).or_default().push(run.token_seconds);
                continue;
            }
            match (&expected, *name) {
                (None, _) => expected = Some(run),
                (Some(expected), "mha") => check("12 layers of 768", expected, &run, false),
                (Some(expected), _) => {
                    eprintln!("{name}: logits apart by {:.1e}", apart(expected, &run))
                }
            }
        }
    }
    println!("{seconds:?}");
    Ok(())
}
