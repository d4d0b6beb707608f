//! The training step on a small random model: properties that hold whatever the reference numbers are.

#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small numbers of tests")]

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

use burn::tensor::{DType, Device, Tensor};
use lora_train::config::{GradientCheckpointing, InitLoraWeights, LoraConfig, OptimizerConfig, TrainConfig};
use lora_train::data::batch::{Answer, Batch, Document, Target};
use lora_train::device::Dtype;
use lora_train::lora::AdapterSet;
use lora_train::measure::figures::ObjectiveFigures;
use lora_train::model::Model;
use lora_train::model::load;
use lora_train::model::weights::{RandomWeights, Weights};
use lora_train::ops::host;
use lora_train::ops::product::F32Products;
use lora_train::spec::ModelConfig;
use lora_train::train::objective::{LossRows, Objective, Weighed};
use lora_train::train::ranks::Ranks;
use lora_train::train::ranks::sums::RankFlags;
use lora_train::train::step::{SkipReason, TrainStep};

fn config() -> ModelConfig {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/tiny.json");
    // With weights of deviation 0.02, all losses would be alike; these are larger.
    ModelConfig { initializer_range: 0.15, ..ModelConfig::from_file(&path).unwrap() }
}

fn model(storage: Dtype, compute: Dtype) -> Model {
    model_on(&Device::flex(), storage, compute)
}

/// A device with autodiff uses no kernels, so this is the result of the plain operations.
fn model_on(device: &Device, storage: Dtype, compute: Dtype) -> Model {
    let config = config();
    let weights = Weights::Random(RandomWeights::new(&config, 1));
    load::load(&config, &weights, storage, compute, device).unwrap()
}

/// Adapters with B unlike zero, so that A has gradients too, and with rows of some tokens, also of the one that fills up.
fn adapters(model: &Model, dropout: f64) -> AdapterSet {
    let mut set = with_b(fresh_adapters(model, dropout));
    model.start_tokens(&mut set, &[9, 0, 40, 12]);
    set
}

/// The set with fixed numbers in B.
pub(crate) fn with_b(mut set: AdapterSet) -> AdapterSet {
    for (index, adapter) in set.iter_mut().enumerate() {
        let shape = adapter.matrices.b.dims();
        let value = |i: usize| ((i * 37 + index * 11) % 101) as f32 / 1010.0 - 0.05;
        adapter.matrices.b =
            host::tensor((0..shape[0] * shape[1]).map(value).collect(), shape, &adapter.matrices.a.device());
    }
    set
}

fn fresh_adapters(model: &Model, dropout: f64) -> AdapterSet {
    let selection = LoraConfig { r: 4, ..LoraConfig::default() }.select(&model.config).unwrap();
    AdapterSet::new(&model.config, &selection, InitLoraWeights::Kaiming, dropout, 2, &model.device())
}

pub(crate) fn step(model: &Model, adapters: AdapterSet, train: &TrainConfig) -> TrainStep {
    let optimizer = OptimizerConfig { learning_rate: 1e-2, ..OptimizerConfig::default() };
    TrainStep::new(model.clone(), adapters, train, &optimizer, None, 0)
}

/// A step on the CPU, and a batch for it.
pub(crate) fn step_and_batch() -> (TrainStep, Batch) {
    let model = model(Dtype::F32, Dtype::F32);
    (step(&model, adapters(&model, 0.0), &TrainConfig::default()), in_rows(&indexed()))
}

/// Rows of different lengths with different shares of target tokens.
fn rows() -> Vec<Vec<u32>> {
    let length = |row: usize| [9, 4, 17, 2, 12, 30, 5, 21][row];
    (0..8).map(|row| (0..length(row)).map(|i| ((row * 131 + i * i * 7 + i * 3) % 250) as u32 + 3).collect()).collect()
}

/// A batch with the given `rows`. Row `i` is masked up to its token `i % 4`.
pub(crate) fn in_rows(rows: &[(usize, Vec<u32>)]) -> Batch {
    let row_lengths = rows.iter().map(|(_, ids)| ids.len()).collect();
    Batch { row_lengths, ..packed(rows) }
}

/// All rows concatenated in one row.
pub(crate) fn packed(rows: &[(usize, Vec<u32>)]) -> Batch {
    let mut batch = Batch::default();
    for (index, ids) in rows {
        let start = batch.input_ids.len();
        batch.documents.push(Document { start, len: ids.len() });
        batch.targets.extend(targets(*index, start, ids));
        batch.input_ids.extend(ids);
    }
    batch.row_lengths = vec![batch.input_ids.len()];
    batch
}

/// Answers to three prompts, in rows of their own, of which only the answers carry loss.
pub(crate) fn answers() -> Batch {
    let mut batch = Batch::default();
    for (prompt, answers) in [(12, &[5, 1][..]), (9, &[3, 8, 2]), (21, &[4, 17])] {
        for (index, len) in answers.iter().enumerate() {
            let id = |at: usize| if at < prompt { at * 7 + prompt } else { at * 11 + index * 29 } % 250 + 3;
            let (start, end) = (batch.input_ids.len(), prompt + len);
            batch.input_ids.extend((0..end).map(|at| id(at) as u32));
            let target = |at| Target { position: start + at - 1, token: id(at) as u32 };
            batch.targets.extend((prompt..end).map(target));
            batch.documents.push(Document { start, len: end });
            batch.answers.push(Answer { is_good: index == 0, prompt_targets: 0, advantage: 0.0, margin: 0.0 });
            batch.row_lengths.push(end);
        }
    }
    batch
}

fn targets(index: usize, start: usize, ids: &[u32]) -> Vec<Target> {
    (1 + index % 4..ids.len()).map(|i| Target { position: start + i - 1, token: ids[i] }).collect()
}

pub(crate) fn indexed() -> Vec<(usize, Vec<u32>)> {
    rows().into_iter().enumerate().collect()
}

fn values(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.to_data().try_to_vec().unwrap()
}

/// Gradients of the current step, concatenated.
pub(crate) fn grads(step: &TrainStep) -> Vec<f32> {
    step.grads().iter().flat_map(|(_, grad)| values(grad)).collect()
}

fn weights_of(adapters: &AdapterSet) -> Vec<f32> {
    adapters.tensors().flat_map(|(_, tensor)| values(tensor)).collect()
}

pub(crate) fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(f, e)| f64::from(f - e)));
    difference / norm(&mut expected.iter().map(|&e| f64::from(e)))
}

#[test]
fn eight_micro_batches_of_one_row_and_one_of_eight_give_equal_gradients_and_updates() {
    let model = model(Dtype::F32, Dtype::F32);
    let mut one = step(&model, adapters(&model, 0.0), &TrainConfig::default());
    let mut eight = step(&model, adapters(&model, 0.0), &TrainConfig::default());
    one.forward_backward(&in_rows(&indexed()));
    for row in indexed() {
        eight.forward_backward(&in_rows(&[row]));
    }
    assert!(relative_error(&grads(&eight), &grads(&one)) < 1e-6);
    let (of_one, of_eight) = (one.update(1e-2), eight.update(1e-2));
    assert_eq!(of_one.target_tokens, of_eight.target_tokens);
    assert!((of_one.loss - of_eight.loss).abs() < 1e-6 && (of_one.grad_norm - of_eight.grad_norm).abs() < 1e-6);
    // The mean of the eight means differs, because the rows differ in length.
    let means: Vec<f64> = indexed()
        .into_iter()
        .map(|row| {
            let sum = one.eval_loss(&in_rows(&[row]));
            sum.sum / sum.target_tokens.max(1) as f64
        })
        .collect();
    let whole = one.eval_loss(&in_rows(&indexed()));
    assert!((means.iter().sum::<f64>() / 8.0 - whole.sum / whole.target_tokens as f64).abs() > 1e-2);
}

#[test]
fn packed_rows_give_the_loss_and_gradients_of_padded_ones() {
    let model = model(Dtype::F32, Dtype::F32);
    for compute in [Dtype::F32, Dtype::Bf16] {
        let model = if compute == Dtype::F32 { model.clone() } else { self::model(Dtype::Bf16, compute) };
        let mut apart = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        let mut together = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        apart.forward_backward(&in_rows(&indexed()));
        together.forward_backward(&packed(&indexed()));
        let tolerance = if compute == Dtype::F32 { 1e-5 } else { 3e-2 };
        let error = relative_error(&grads(&together), &grads(&apart));
        assert!(error < tolerance, "{compute:?}: {error}");
        let (apart, together) = (apart.update(0.0).loss, together.update(0.0).loss);
        assert!((apart - together).abs() < tolerance * apart, "{compute:?}: {apart} against {together}");
    }
}

#[test]
fn what_documents_begin_with_alike_is_computed_once_and_changes_neither_loss_nor_gradients() {
    let model = model(Dtype::F32, Dtype::F32);
    let together = answers();
    for (is_noisy, shared) in [(false, 11 + 2 * 8 + 20), (true, 0)] {
        assert_eq!(together.num_tokens() - model.arranged(&together, is_noisy).num_tokens(), shared);
    }
    let without_answers = Batch { answers: Vec::new(), ..together.clone() };
    let apart: Vec<Batch> = (0..together.num_rows()).map(|row| without_answers.part(row..row + 1)).collect();
    let results = [std::slice::from_ref(&together), &apart].map(|batches| {
        let mut step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        step.accumulate(batches);
        (grads(&step), step.update(0.0).loss)
    });
    let [(together, loss), (apart, exact)] = &results;
    assert!(relative_error(together, apart) < 1e-5 && (loss - exact).abs() < 1e-6 * exact, "{loss} against {exact}");
}

#[test]
fn plain_operations_give_the_losses_and_gradients_of_the_kernels() {
    let kernels = model(Dtype::F32, Dtype::F32);
    let plain = model_on(&Device::flex().autodiff(), Dtype::F32, Dtype::F32);
    let split = plain.clone().with_f32_products(F32Products::Split);
    // The masks of dropout are those of a token's place in its micro-batch, which padding would change.
    let cases = [(packed(&indexed()), 0.3), (in_rows(&indexed()), 0.0), (in_rows(&indexed()[..1]), 0.5)];
    for (batch, dropout) in cases {
        let run = |model: &Model| {
            let mut step = step(model, adapters(model, dropout), &TrainConfig::default());
            step.forward_backward(&batch);
            let (grads, outcome) = (grads(&step), step.update(0.0));
            (grads, [outcome.loss, outcome.grad_norm, step.eval_loss(&batch).mean().unwrap()])
        };
        let (expected_grads, expected) = run(&kernels);
        for model in [&plain, &split] {
            let (grads, found) = run(model);
            assert!(relative_error(&grads, &expected_grads) < 2e-5, "{}", relative_error(&grads, &expected_grads));
            for (found, expected) in found.into_iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5 * expected, "{found} against {expected}, dropout {dropout}");
            }
        }
    }
}

#[test]
fn padding_of_rows_and_rows_of_padding_change_neither_loss_nor_gradients() {
    // 64 tokens: packed they need no padding, apart every row is computed at 64.
    let rows: Vec<_> = indexed().into_iter().filter(|(_, ids)| [30, 21, 9, 4].contains(&ids.len())).collect();
    let (together, apart) = (packed(&rows), in_rows(&rows));
    let mut filled = apart.clone();
    filled.row_lengths.push(0);
    assert_eq!([&together, &apart, &filled].map(Batch::num_padding_tokens), [0, 3 * 64, 4 * 64]);
    let (kernels, plain) = (Device::flex(), Device::flex().autodiff());
    let run = |device, batch| {
        let model = model_on(device, Dtype::F32, Dtype::F32);
        let mut step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        let eval_loss = step.eval_loss(batch).mean().unwrap();
        step.forward_backward(batch);
        (grads(&step), [step.update(0.0).loss, eval_loss])
    };
    let (expected, expected_losses) = run(&plain, &together);
    for (device, batch) in [(&plain, &apart), (&plain, &filled), (&kernels, &apart), (&kernels, &filled)] {
        let (found, losses) = run(device, batch);
        assert!(relative_error(&found, &expected) < 1e-5);
        assert!(losses.iter().zip(expected_losses).all(|(found, expected)| (found - expected).abs() < 1e-5 * expected));
    }
}

#[test]
fn fresh_adapters_leave_the_base_models_logits_bit_for_bit() {
    let model = model(Dtype::F32, Dtype::F32);
    let batch = packed(&indexed());
    let base = values(&model.logits(&batch, &AdapterSet::none(model.blocks.len())));
    assert_eq!(values(&model.logits(&batch, &fresh_adapters(&model, 0.5))), base);
    assert_ne!(values(&model.logits(&batch, &adapters(&model, 0.0))), base);
}

#[test]
fn neither_recomputed_blocks_nor_layered_accumulation_change_a_bit_of_the_gradients() {
    let model = model(Dtype::F32, Dtype::F32);
    // Also with dropout: the masks are recomputed, not kept.
    for dropout in [0.0, 0.3] {
        use GradientCheckpointing::{Blocks, Off, Offload, On};
        let ways = [Off, On, Blocks(1), Blocks(2), Offload];
        let ways = ways.into_iter().flat_map(|way| [(way, false), (way, true)]);
        let mut results = ways.map(|(gradient_checkpointing, layered_accumulation)| {
            let train = TrainConfig { gradient_checkpointing, layered_accumulation, ..TrainConfig::default() };
            let mut step = step(&model, adapters(&model, dropout), &train);
            // Several micro-batches, so that the transfer to host memory is used again; one has no target token.
            let [first, second] = [0..5, 5..8].map(|rows| in_rows(&indexed()[rows]));
            let without = Batch { targets: Vec::new(), ..first.clone() };
            step.accumulate(&[first.clone(), without, second, first]);
            (grads(&step), step.counters(), step.update(1e-2), weights_of(step.adapters()))
        });
        let one_by_one = results.next().unwrap();
        assert_eq!(one_by_one.1.num_micro_batches, 3);
        assert!(results.all(|result| result == one_by_one));
    }
}

/// Row `i` weighs 1 / (i + 1), and a step counts rows.
#[derive(Debug)]
struct ByRow;

fn weight_of(row: usize) -> f64 {
    1.0 / (row + 1) as f64
}

impl Objective for ByRow {
    fn weigh(&self, rows: &LossRows<'_>) -> Weighed {
        let of_row = |(row, targets): (usize, &Range<usize>)| {
            let sum: f64 = rows.log_probabilities[targets.clone()].iter().map(|&value| f64::from(value)).sum();
            (-sum * weight_of(row), vec![weight_of(row) as f32; targets.len()])
        };
        let (losses, weights): (Vec<f64>, Vec<_>) = rows.targets.iter().enumerate().map(of_row).unzip();
        let weights = Some(weights.concat());
        Weighed {
            loss: Some(losses.iter().sum()),
            count: rows.targets.len() as f64,
            weights,
            figures: ObjectiveFigures::default(),
        }
    }
}

#[test]
fn an_objective_weighs_every_token_by_the_log_probabilities_of_its_row() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let model = model_on(&device, Dtype::F32, Dtype::F32);
        let (train, all) = (TrainConfig::default(), indexed());
        let mut whole = step(&model, adapters(&model, 0.0), &train).with_objective(Box::new(ByRow));
        whole.forward_backward(&packed(&all));
        let mut expected = vec![0.0; grads(&whole).len()];
        let mut loss = 0.0;
        for (row, ids) in all.iter().enumerate() {
            let mut one = step(&model, adapters(&model, 0.0), &train);
            let batch = in_rows(std::slice::from_ref(ids));
            one.forward_backward(&batch);
            expected.iter_mut().zip(grads(&one)).for_each(|(sum, grad)| *sum += weight_of(row) as f32 * grad);
            loss += weight_of(row) * one.eval_loss(&batch).sum;
        }
        assert!(relative_error(&grads(&whole), &expected) < 1e-5, "{}", relative_error(&grads(&whole), &expected));
        let evaluated = whole.eval_loss(&packed(&all)).mean().unwrap();
        let outcome = whole.update(1e-2);
        assert!((outcome.loss - evaluated).abs() < 1e-5 * evaluated, "{} {evaluated}", outcome.loss);
        assert!((outcome.loss - loss / all.len() as f64).abs() < 1e-5 * outcome.loss, "{} {loss}", outcome.loss);
        assert_eq!((outcome.count, outcome.target_tokens), (8.0, packed(&all).num_target_tokens() as u64));
    }
}

/// Gradients and figures of a rank.
type Sums = (Vec<f32>, Vec<f64>);

/// One of two ranks that are threads of this process.
#[derive(Debug)]
struct OfTwo {
    rank: usize,
    shared: Arc<(Barrier, Mutex<[Sums; 2]>)>,
}

impl Ranks for OfTwo {
    fn size(&self) -> usize {
        2
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn sum(&mut self, gradients: &mut [f32], figures: &mut [f64]) {
        let (barrier, of_ranks) = &*self.shared;
        of_ranks.lock().unwrap()[self.rank] = (gradients.to_vec(), figures.to_vec());
        barrier.wait();
        let [first, second] = of_ranks.lock().unwrap().clone();
        gradients.iter_mut().enumerate().for_each(|(i, sum)| *sum = first.0[i] + second.0[i]);
        figures.iter_mut().enumerate().for_each(|(i, sum)| *sum = first.1[i] + second.1[i]);
        barrier.wait();
    }
}

#[test]
fn two_ranks_with_half_of_the_micro_batches_each_update_as_one_rank_with_all() {
    let model = model(Dtype::F32, Dtype::F32);
    let halves = [0..5, 5..8].map(|rows| in_rows(&indexed()[rows]));
    let mut alone = step(&model, adapters(&model, 0.0), &TrainConfig::default());
    alone.accumulate(&halves);
    let expected = alone.update(1e-2);
    let shared = Arc::new((Barrier::new(2), Mutex::default()));
    let ranks = std::thread::scope(|scope| {
        let run = |rank: usize| {
            let of_two = OfTwo { rank, shared: Arc::clone(&shared) };
            let (model, batch) = (model.clone(), halves[rank].clone());
            scope.spawn(move || {
                let step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
                let mut step = step.with_ranks(Box::new(of_two));
                assert!(step.ranks().agree(rank == 1) && !step.ranks().agree(false));
                step.forward_backward(&batch);
                (step.update(1e-2), weights_of(step.adapters()))
            })
        };
        let ranks = [run(0), run(1)];
        ranks.map(|rank| rank.join().unwrap())
    });
    assert_eq!(ranks[0], ranks[1]);
    let (outcome, weights) = &ranks[0];
    assert_eq!((outcome.count, outcome.target_tokens), (expected.count, expected.target_tokens));
    assert!((outcome.loss - expected.loss).abs() < 1e-6 && (outcome.grad_norm - expected.grad_norm).abs() < 1e-6);
    assert_eq!(*weights, weights_of(alone.adapters()), "sums of two have one order");
}

#[test]
fn ranks_share_a_micro_batch_with_the_masks_of_the_whole_and_drop_a_step_of_which_one_has_failed() {
    let model = model(Dtype::F32, Dtype::F32);
    let batch = in_rows(&indexed());
    let train = TrainConfig { neftune_noise_alpha: Some(5.0), ..TrainConfig::default() };
    let mut alone = step(&model, adapters(&model, 0.3), &train);
    alone.forward_backward(&batch);
    let expected = (grads(&alone), alone.update(1e-2).loss);
    let shared = Arc::new((Barrier::new(2), Mutex::default()));
    let ranks = std::thread::scope(|scope| {
        let run = |rank: usize| {
            let of_two = OfTwo { rank, shared: Arc::clone(&shared) };
            let (model, batch, train) = (model.clone(), batch.clone(), train.clone());
            scope.spawn(move || {
                let mut step = step(&model, adapters(&model, 0.3), &train).with_ranks(Box::new(of_two));
                let mut share = |flags| {
                    step.start();
                    step.set_flags(flags);
                    let inputs = step.lay_out_share(vec![batch.clone()]);
                    for inputs in inputs {
                        let forward = step.forward(vec![inputs]);
                        step.backward(forward);
                    }
                    let figures = step.reduce(None);
                    let found = (grads(&step), figures.loss, step.flags_of_ranks(), step.of_ranks().to_vec());
                    step.discard();
                    (found, step.counters().num_micro_batches)
                };
                let failed = share(RankFlags { stop: false, failed: rank == 1 });
                (failed, share(RankFlags { stop: rank == 0, failed: false }))
            })
        };
        let ranks = [run(0), run(1)];
        ranks.map(|rank| rank.join().unwrap())
    });
    for (((_, _, failed, _), num_before), ((grads, loss, flags, of_ranks), num_after)) in ranks {
        assert_eq!((failed, num_before), (RankFlags { stop: false, failed: true }, 0));
        assert_eq!((flags, num_after), (RankFlags { stop: true, failed: false }, 1));
        assert!(relative_error(&grads, &expected.0) < 1e-5, "{}", relative_error(&grads, &expected.0));
        assert!((loss - expected.1).abs() < 1e-6);
        let tokens: f64 = of_ranks.iter().map(|rank| rank.tokens).sum();
        assert!(tokens == batch.num_tokens() as f64 && of_ranks.iter().all(|rank| rank.tokens > 0.0));
    }
}

#[test]
fn chunks_of_the_loss_change_no_bit_of_losses_and_gradients() {
    let model = model(Dtype::F32, Dtype::F32);
    let batch = in_rows(&indexed());
    let run = |loss_chunk_tokens| {
        let train = TrainConfig { loss_chunk_tokens, ..TrainConfig::default() };
        let mut step = step(&model, adapters(&model, 0.0), &train);
        step.forward_backward(&batch);
        (grads(&step), step.eval_loss(&batch))
    };
    let whole = run(None);
    assert!(batch.targets.len() > 20 && whole.0.iter().any(|value| *value != 0.0));
    for tokens in [1, 7, 16, 1000] {
        assert_eq!(run(Some(tokens)), whole, "{tokens}");
    }
}

#[test]
fn dropout_is_on_in_training_off_in_evaluation_and_on_the_input_of_a_only() {
    let model = model(Dtype::F32, Dtype::F32);
    let batch = in_rows(&indexed());
    let gradients = |dropout| {
        let mut step = step(&model, adapters(&model, dropout), &TrainConfig::default());
        step.forward_backward(&batch);
        grads(&step)
    };
    assert!(relative_error(&gradients(0.5), &gradients(0.0)) > 0.1);
    let eval = |dropout| step(&model, adapters(&model, dropout), &TrainConfig::default()).eval_loss(&batch);
    assert_eq!(eval(0.5), eval(0.0));
    // With B = 0 the update is zero whatever dropout does: the base path has no dropout.
    let loss = |dropout| {
        let mut step = step(&model, fresh_adapters(&model, dropout), &TrainConfig::default());
        step.forward_backward(&batch);
        step.update(0.0).loss
    };
    assert_eq!(loss(0.5), loss(0.0));
    // Two micro-batches of equal rows get different masks.
    let mut twice = step(&model, adapters(&model, 0.5), &TrainConfig::default());
    twice.forward_backward(&batch);
    let first = grads(&twice);
    twice.forward_backward(&batch);
    let doubled: Vec<f32> = first.iter().map(|g| 2.0 * g).collect();
    assert!(relative_error(&grads(&twice), &doubled) > 0.05);
}

#[test]
fn clipping_scales_all_gradients_by_the_global_norm_after_accumulation() {
    let model = model(Dtype::F32, Dtype::F32);
    let run = |max_grad_norm| {
        let train = TrainConfig { max_grad_norm, ..TrainConfig::default() };
        let mut step = step(&model, adapters(&model, 0.0), &train);
        for row in indexed() {
            step.forward_backward(&in_rows(&[row]));
        }
        let gradient = grads(&step);
        let outcome = step.update(1.0);
        (outcome, gradient, step.state().moments)
    };
    let (free, gradient, _) = run(0.0);
    let num_targets = free.target_tokens as f64;
    let norm = gradient.iter().map(|&g| (f64::from(g) / num_targets).powi(2)).sum::<f64>().sqrt();
    assert!((free.grad_norm / norm - 1.0).abs() < 1e-5, "{} against {norm}", free.grad_norm);
    let (clipped, _, moments) = run(0.25 * norm);
    assert_eq!(clipped.grad_norm, free.grad_norm, "the norm is reported before clipping");
    // After one update the first moment is a tenth of the gradient used, which is a quarter of the unclipped one.
    let first: Vec<f32> =
        moments.iter().filter(|t| t.name.ends_with("exp_avg")).flat_map(|t| t.values.numbers().to_vec()).collect();
    let expected: Vec<f32> = gradient.iter().map(|g| (f64::from(*g) / num_targets * 0.25 * 0.1) as f32).collect();
    assert!(relative_error(&first, &expected) < 1e-4);
}

#[test]
fn a_step_with_a_loss_that_is_not_finite_changes_nothing_and_is_reported() {
    let model = model(Dtype::F32, Dtype::F32);
    let mut broken = model.clone();
    broken.norm.weight = broken.norm.weight.clone() * f32::NAN;
    let mut step = step(&broken, adapters(&model, 0.0), &TrainConfig::default());
    let before = (weights_of(step.adapters()), step.state());
    step.forward_backward(&in_rows(&indexed()));
    let outcome = step.update(1e-2);
    assert_eq!(outcome.skipped, Some(SkipReason::NonFiniteLoss));
    assert_eq!(weights_of(step.adapters()), before.0);
    assert_eq!(step.state().moments, before.1.moments);
    assert_eq!(step.state().counters.num_updates, 0);
}

#[test]
fn a_batch_without_target_tokens_is_skipped() {
    let model = model(Dtype::F32, Dtype::F32);
    let mut step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
    let batch = Batch { targets: Vec::new(), ..in_rows(&indexed()) };
    step.forward_backward(&batch);
    assert_eq!(step.update(1e-2).skipped, Some(SkipReason::NoTargetTokens));
    assert_eq!(step.eval_loss(&batch).target_tokens, 0);
}

#[test]
fn only_adapters_are_trained_and_kept_and_all_of_it_in_f32() {
    for (storage, compute) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F16)] {
        let model = model(storage, compute);
        let mut step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        let frozen = values(&model.blocks[0].linears[0].values.dense().into_owned().cast(DType::F32));
        step.forward_backward(&in_rows(&indexed()));
        let outcome = step.update(1e-2);
        assert_eq!(outcome.skipped, None, "{compute:?}");
        assert_eq!(values(&step.model().blocks[0].linears[0].values.dense().into_owned().cast(DType::F32)), frozen);
        assert_eq!(step.model().blocks[0].linears[0].values.dense().dtype(), DType::from(storage));
        let num_adapters = step.adapters().iter().count();
        assert_eq!(step.state().moments.len(), 4 * num_adapters + 2, "two of the rows of tokens");
        for adapter in step.adapters().iter() {
            assert!(adapter.matrices.as_ref().values().all(|matrix| matrix.dtype() == DType::F32));
        }
    }
}

#[test]
fn half_precisions_stay_close_to_f32_in_loss_and_gradient() {
    let reference = model(Dtype::F32, Dtype::F32);
    let mut step32 = step(&reference, adapters(&reference, 0.0), &TrainConfig::default());
    step32.forward_backward(&in_rows(&indexed()));
    let expected = grads(&step32);
    let loss = step32.update(0.0).loss;
    // Relative precision is 2^-9 and 2^-12, and a few dozen roundings separate the input from the gradients.
    let plain = Device::flex().autodiff();
    for (device, dtype, loss_tolerance, grad_tolerance) in [
        (&Device::flex(), Dtype::Bf16, 1e-2, 2.5e-2),
        (&plain, Dtype::Bf16, 2e-2, 3.5e-2),
        (&plain, Dtype::F16, 2e-3, 5e-3),
    ] {
        let model = model_on(device, dtype, dtype);
        let mut step = step(&model, adapters(&model, 0.0), &TrainConfig::default());
        step.forward_backward(&in_rows(&indexed()));
        let error = relative_error(&grads(&step), &expected);
        assert!(error < grad_tolerance, "{dtype:?}: gradient off by {error}");
        let found = step.update(0.0).loss;
        assert!((found - loss).abs() < loss_tolerance * loss, "{dtype:?}: loss {found}, in f32 {loss}");
    }
}

#[test]
fn an_overflow_in_f16_skips_the_step_and_halves_the_loss_scale() {
    let model = model(Dtype::F16, Dtype::F16);
    let mut set = adapters(&model, 0.0);
    for adapter in set.iter_mut() {
        adapter.scale *= 3e3;
    }
    let mut step = step(&model, set, &TrainConfig::default());
    let scale = |step: &TrainStep| serde_json::to_value(step.state().counters).unwrap()["loss_scale"]["scale"].as_f64();
    let before = scale(&step).unwrap();
    step.forward_backward(&in_rows(&indexed()));
    assert!(step.update(1e-2).skipped.is_some());
    assert_eq!(scale(&step), Some(before / 2.0));
}

#[test]
fn eight_rows_can_be_memorised() {
    let model = model(Dtype::F32, Dtype::F32);
    let mut step = step(&model, fresh_adapters(&model, 0.0), &TrainConfig::default());
    let batch = in_rows(&indexed());
    let losses: Vec<f64> = (0..150)
        .map(|_| {
            step.forward_backward(&batch);
            step.update(1e-2).loss
        })
        .collect();
    assert!(losses[0] > 4.0 && losses[149] < 0.1, "from {} to {}", losses[0], losses[149]);
}

#[test]
fn evaluation_is_deterministic_and_weighted_by_tokens() {
    let model = model(Dtype::F32, Dtype::F32);
    let step = step(&model, adapters(&model, 0.4), &TrainConfig::default());
    let whole = step.eval_loss(&in_rows(&indexed()));
    assert_eq!(step.eval_loss(&in_rows(&indexed())), whole);
    let parts = indexed()
        .chunks(3)
        .map(|rows| step.eval_loss(&in_rows(rows)))
        .fold((0.0, 0), |(sum, tokens), part| (sum + part.sum, tokens + part.target_tokens));
    assert_eq!(parts.1, whole.target_tokens);
    assert!((parts.0 - whole.sum).abs() < 1e-4 * whole.sum);
}

#[test]
fn a_restored_state_continues_bit_for_bit_also_with_dropout() {
    let model = model(Dtype::F32, Dtype::F32);
    let train = TrainConfig::default();
    let run = |step: &mut TrainStep, from: usize, to: usize| {
        for i in from..to {
            step.forward_backward(&in_rows(&indexed()[i % 8..=i % 8]));
            step.forward_backward(&in_rows(&indexed()[(i + 3) % 8..=(i + 3) % 8]));
            step.update(1e-2);
        }
    };
    let mut straight = step(&model, fresh_adapters(&model, 0.2), &train);
    run(&mut straight, 0, 20);
    let mut first = step(&model, fresh_adapters(&model, 0.2), &train);
    run(&mut first, 0, 10);
    let (adapters, state) = (first.adapters().clone(), first.state());
    let mut second = step(&model, fresh_adapters(&model, 0.2), &train);
    second.restore(adapters, &state).unwrap();
    run(&mut second, 10, 20);
    assert_eq!(weights_of(second.adapters()), weights_of(straight.adapters()));
    assert_eq!(second.state(), straight.state());
}

#[test]
fn layers_below_the_first_adapter_and_projections_without_one_get_no_gradient() {
    let model = model(Dtype::F32, Dtype::F32);
    let lora = LoraConfig {
        target_modules: lora_train::config::TargetModules::Names(vec!["v_proj".into(), "up_proj".into()]),
        layers_to_transform: Some(vec![1]),
        ..LoraConfig::default()
    };
    let selection = lora.select(&model.config).unwrap();
    let set = AdapterSet::new(&model.config, &selection, InitLoraWeights::Kaiming, 0.0, 2, &model.device());
    let mut step = step(&model, set, &TrainConfig::default());
    step.forward_backward(&in_rows(&indexed()));
    assert_eq!(step.grads().iter().count(), 2 * 2);
    assert_eq!(step.update(1e-2).skipped, None);
}
