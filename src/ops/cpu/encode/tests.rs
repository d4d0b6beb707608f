use super::super::Blocks;
use super::*;

struct Golden(Vec<u8>);

impl Golden {
    fn read() -> Self {
        Self(include_bytes!("../../../../tests/golden/gguf_blocks.safetensors").to_vec())
    }

    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        Some(safetensors::SafeTensors::deserialize(&self.0).unwrap().tensor(name).ok()?.data().to_vec())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.bytes(name).unwrap())
    }
}

const WIDTH: usize = 512;

fn decoded(kind: GgufType, blocks: &[u8], num: usize) -> Vec<f32> {
    let mut numbers = vec![f32::NAN; num];
    Blocks { kind, bytes: blocks }.decode(0, &mut numbers);
    numbers
}

fn relative_error(numbers: &[f32], decoded: &[f32]) -> f64 {
    let squares = |of: &dyn Fn(usize) -> f32| (0..numbers.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
    (squares(&|i| decoded[i] - numbers[i]) / squares(&|i| numbers[i])).sqrt()
}

#[test]
fn blocks_of_every_type_have_llama_cpps_bytes_with_an_importance_and_without() {
    let golden = Golden::read();
    let (numbers, importance) = (golden.floats("numbers"), golden.floats("importance"));
    for kind in ENCODED {
        for (part, importance) in [("blocks", None), ("weighted", Some(&importance[..]))] {
            let blocks = encode(kind, &numbers, WIDTH, importance).unwrap();
            // Where it makes no difference it is stored once.
            let expected = golden.bytes(&format!("{kind}.{part}")).or(golden.bytes(&format!("{kind}.blocks"))).unwrap();
            let size = type_size(kind);
            assert_eq!(blocks.len(), expected.len());
            for (i, (block, expected)) in blocks.chunks(size).zip(expected.chunks(size)).enumerate() {
                let row = i * kind.block_size() / WIDTH;
                assert_eq!(block, expected, "{kind}.{part}: block {i} (row {row})");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_blocks_alone() {
    let golden = Golden::read();
    let (numbers, importance) = (golden.floats("numbers"), golden.floats("importance"));
    for kind in ENCODED {
        let whole = encode(kind, &numbers, WIDTH, Some(&importance)).unwrap();
        let rows = numbers.chunks(WIDTH).flat_map(|row| encode(kind, row, WIDTH, Some(&importance)).unwrap());
        assert!(rows.eq(whole), "{kind}");
    }
}

#[test]
fn what_is_decoded_is_as_near_as_the_bits_of_a_type_allow() {
    let numbers = &Golden::read().floats("numbers")[..2 * WIDTH];
    for (kind, bound) in [
        (GgufType::Q8_0, 0.006),
        (GgufType::Q6_K, 0.02),
        (GgufType::Q5_K, 0.04),
        (GgufType::Q5_1, 0.045),
        (GgufType::Q5_0, 0.05),
        (GgufType::Q4_K, 0.08),
        (GgufType::IQ4_XS, 0.085),
        (GgufType::IQ4_NL, 0.085),
        (GgufType::Q4_1, 0.09),
        (GgufType::Q4_0, 0.1),
        (GgufType::NVFP4, 0.11),
        (GgufType::MXFP4, 0.13),
        (GgufType::Q3_K, 0.17),
        (GgufType::Q2_K, 0.34),
    ] {
        let blocks = encode(kind, numbers, WIDTH, None).unwrap();
        let error = relative_error(numbers, &decoded(kind, &blocks, numbers.len()));
        assert!(bound / 2.0 < error && error < bound, "{kind}: {error}");
    }
}

#[test]
fn under_kept_scales_the_same_numbers_get_the_same_codes_and_others_the_nearest() {
    let numbers = &Golden::read().floats("numbers")[..2 * WIDTH];
    for kind in ENCODED.into_iter().filter(|kind| kind.block_size() == 256) {
        let blocks = encode(kind, numbers, WIDTH, None).unwrap();
        let mut again = blocks.clone();
        encode_codes(kind, numbers, WIDTH, &mut again).unwrap();
        if kind != GgufType::IQ4_XS {
            // ggml chooses that type's codes before the block's scale is rounded.
            assert_eq!(again, blocks, "{kind}");
        }
        // What can be decoded is its own nearest.
        let exact = decoded(kind, &blocks, numbers.len());
        let mut again = blocks.clone();
        encode_codes(kind, &exact, WIDTH, &mut again).unwrap();
        assert_eq!(decoded(kind, &again, numbers.len()), exact, "{kind}");
        let zeros = vec![0.0; numbers.len()];
        encode_codes(kind, &zeros, WIDTH, &mut again).unwrap();
        let rest = decoded(kind, &again, numbers.len());
        assert!(rest.iter().zip(&exact).all(|(rest, exact)| rest.abs() <= exact.abs()), "{kind}");
    }
}

#[test]
fn numbers_that_are_not_finite_and_scales_beyond_f16_are_an_overflow() {
    for kind in ENCODED {
        for number in [f32::NAN, f32::INFINITY, 1e30] {
            let mut numbers = vec![0.5; WIDTH];
            numbers[300] = number;
            // These clamp a scale instead.
            let clamps = matches!(kind, GgufType::MXFP4 | GgufType::NVFP4) && number == 1e30;
            assert_eq!(encode(kind, &numbers, WIDTH, None).is_err(), !clamps, "{kind} {number}");
        }
        assert!(encode(kind, &[], WIDTH, None).unwrap().is_empty());
    }
}
