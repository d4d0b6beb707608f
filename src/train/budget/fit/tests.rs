use super::*;
use crate::config::Precision;
use crate::device::DeviceKind;
use crate::lora::targets::Selection;
use crate::ops::place::place_on;
use crate::spec::ModelConfig;
use crate::train::budget::workload::tests as memory;

const GIB: f64 = 1_073_741_824.0;

fn model() -> (ModelConfig, Selection) {
    memory::model(include_str!("../../../../configs/smollm2-135m.json"), 8)
}

fn workload<'a>(config: &'a ModelConfig, selection: &'a Selection) -> Workload<'a> {
    Workload { rows: 8, row_length: 2048, gradient_accumulation_steps: 2, ..memory::workload(config, selection) }
}

#[test]
fn the_largest_number_that_holds_is_found() {
    assert_eq!(largest(|n| n <= 37), Some(37));
    assert_eq!(largest(|n| n <= 1), Some(1));
    assert_eq!(largest(|_| true), Some(4096));
    assert_eq!(largest(|_| false), None);
}

#[test]
fn what_does_not_fit_is_reported_with_changes_that_do_and_keep_the_rows_of_a_step() {
    let (config, selection) = model();
    let workload = workload(&config, &selection);
    assert_eq!(shortage(&workload, Memories::of_device(64.0 * GIB), "this machine"), None);
    let text = shortage(&workload, Memories::of_device(6.0 * GIB), "this machine").unwrap();
    assert!(text.contains("is estimated to need 11.73 GiB"), "{text}");
    assert!(text.contains("and this machine has 6.00 GiB"), "{text}");
    let memory = 6.0 * GIB;
    let found = that_fit(&workload, Memories::of_device(memory));
    assert!(found.len() >= 2, "{found:?}");
    let number = |settings: &str, key: &str, otherwise: usize| {
        let value = settings.split(' ').find_map(|setting| setting.strip_prefix(key)?.strip_prefix('='));
        value.map_or(otherwise, |value| value.parse().unwrap())
    };
    let rows_of_step = |settings: &str, rows: usize| {
        let rows = number(settings, "train.micro_batch_size", rows);
        rows * number(settings, "train.gradient_accumulation_steps", 2)
    };
    for Suggestion { settings, peak_bytes } in &found {
        assert!(as_f64(*peak_bytes) <= memory * USABLE, "{settings}");
        assert!(number(settings, "train.micro_batch_size", 8) <= 8, "{settings}");
        assert_eq!(rows_of_step(settings, 8), 16, "{settings}");
    }
    // The rows of a step must stay equal, even if more would fit: 5 rows of 2 x 7 would make an update of 15.
    for tenths in 10..60 {
        let odd = Workload { rows: 7, ..workload.clone() };
        for Suggestion { settings, .. } in that_fit(&odd, Memories::of_device(f64::from(tenths) * 2e8)) {
            assert_eq!(rows_of_step(&settings, 7), 14, "{settings}");
        }
    }
    assert!(text.contains(&format!("`{}`", found[0].arguments())), "{text}");
    let first = found[1].settings.split(' ').next().unwrap();
    assert_eq!(first, "train.gradient_checkpointing=true");
}

#[test]
fn what_ran_out_although_it_fitted_is_reported_with_less() {
    let (config, selection) = model();
    let workload = workload(&config, &selection);
    let text = advice(&workload, Some(64.0 * GIB), None, "cuda:0 (a GPU)");
    assert!(text.starts_with("cuda:0 (a GPU) has no memory left; a step whose rows"), "{text}");
    assert!(text.contains("hint: less is needed with `--set train."), "{text}");
    for change in that_fit(&workload, Memories::of_device(0.75 * as_f64(workload.plan().peak_bytes))) {
        assert!(change.peak_bytes < workload.plan().peak_bytes * 3 / 4);
    }
}

#[test]
fn checkpointing_is_off_where_half_as_much_again_as_it_saves_is_left() {
    let (config, selection) = model();
    let workload = workload(&config, &selection);
    let peak =
        |gradient_checkpointing| as_f64(Workload { gradient_checkpointing, ..workload.clone() }.plan().peak_bytes);
    let (off, on) = (peak(GradientCheckpointing::Off), peak(GradientCheckpointing::On));
    let enough = (on + 1.5 * (off - on)) / USABLE;
    let choice = |bytes| Decision::new(&workload, bytes).choice;
    assert_eq!(choice(Some(1.001 * enough)), GradientCheckpointing::Off);
    // With less room some blocks keep everything, as many as fit.
    let some = |share: f64| choice(Some((on + 1.5 * share * (off - on)) / USABLE));
    assert_eq!(some(0.99), GradientCheckpointing::Blocks(1));
    let GradientCheckpointing::Blocks(half) = some(0.5) else { panic!("{:?}", some(0.5)) };
    assert!((13..=18).contains(&half), "{half}");
    assert!(peak(GradientCheckpointing::Blocks(half)) <= on + 0.5 * (off - on));
    assert!(peak(GradientCheckpointing::Blocks(half - 1)) > on + 0.5 * (off - on));
    // To keep what the last block has takes no more than to compute it again; what attention gives comes before.
    let all = peak(GradientCheckpointing::Blocks(30));
    assert!(peak(GradientCheckpointing::Blocks(29)) <= all);
    let attended = (all - on) / (off - on);
    assert_eq!(some(1.001 * attended), GradientCheckpointing::Blocks(29));
    assert_eq!(some(0.9 * attended), GradientCheckpointing::On);
    assert_eq!(choice(None), GradientCheckpointing::On);
    let text = Decision::new(&workload, Some(64.0 * GIB)).to_string();
    assert!(text.starts_with("off, as there is room (it would save up to 9."), "{text}");
    let text = Decision::new(&workload, Some(1.0)).to_string();
    assert!(text.starts_with("on: without it a step takes up to 9.") && text.ends_with(" are left"), "{text}");
    assert_eq!(Decision::kept(GradientCheckpointing::Offload).to_string(), "offload, as in the run that is resumed");
}

#[test]
fn logits_of_more_tokens_than_it_takes_are_the_first_to_go() {
    let (config, selection) = model();
    let workload = Workload {
        rows: 1,
        gradient_checkpointing: GradientCheckpointing::On,
        loss_chunk: LossChunk::Tokens(1 << 20),
        ..workload(&config, &selection)
    };
    let without = Workload { loss_chunk: LossChunk::Auto, ..workload.clone() }.plan().peak_bytes;
    // All 2048 tokens at a time; a quarter of them fills 96 MiB.
    assert_eq!(workload.plan().peak_bytes - without, 3 * 512 * 49_152 * 4);
    let found = that_fit(&workload, Memories::of_device(1.001 * as_f64(without) / USABLE));
    let first = Suggestion { settings: "train.loss_chunk_tokens=512".into(), peak_bytes: without };
    assert_eq!(found.first(), Some(&first), "{found:?}");
}

#[test]
fn block_inputs_are_offloaded_only_where_the_host_holds_them() {
    let (config, selection) = model();
    let workload = Workload { place: place_on(DeviceKind::Cuda), rows: 16, ..workload(&config, &selection) };
    let offloads = |host_bytes: Option<f64>| {
        let found = largest_that_fit(&workload, Memories { device_bytes: 8.0 * GIB, host_bytes });
        let rows = |setting: &str| setting.strip_prefix("train.micro_batch_size=").map(|rows| rows.parse().unwrap());
        let offload = found.iter().find(|change| change.settings.contains("offload"))?;
        offload.settings.split(' ').find_map(rows)
    };
    let all: usize = offloads(None).unwrap();
    assert_eq!(offloads(Some(64.0 * GIB)), Some(all));
    // A row parks 30 layers of 2,048 x 576 numbers, 135 MiB: beside the process, 2 GiB have room for six rows.
    let few = offloads(Some(2.0 * GIB)).unwrap();
    assert!(few < all && few == 6, "{few} of {all} rows");
    assert_eq!(offloads(Some(0.5 * GIB)), None);
}

#[test]
fn too_little_host_memory_beside_a_gpu_is_reported() {
    let (config, selection) = model();
    let gradient_checkpointing = GradientCheckpointing::Offload;
    let workload =
        Workload { place: place_on(DeviceKind::Cuda), gradient_checkpointing, ..workload(&config, &selection) };
    let memories = Memories { device_bytes: 80.0 * GIB, host_bytes: Some(1.5 * GIB) };
    let text = shortage(&workload, memories, "cuda:0").unwrap();
    assert!(text.contains(" of host memory (parked for the backward 1.05 GiB, process and driver 1.00 GiB"), "{text}");
    assert!(text.contains("and this process has 1.50 GiB"), "{text}");
    assert_eq!(shortage(&workload, Memories { host_bytes: Some(5.0 * GIB), ..memories }, "cuda:0"), None);
}

#[test]
fn weights_elsewhere_are_suggested_where_nothing_else_fits() {
    let (config, selection) = memory::model(include_str!("../../../../configs/llama-3.1-8b.json"), 8);
    let on_cpu = Workload { rows: 1, row_length: 256, ..memory::workload(&config, &selection) };
    let on_cpu = Workload { storage: Dtype::Bf16.into(), precision: Precision::Bf16, ..on_cpu };
    let residency = |workload: &Workload<'_>, memories| {
        let found = that_fit(workload, memories);
        let mut settings = found.iter().flat_map(|change| change.settings.split(' '));
        settings.find_map(|setting| setting.strip_prefix("model.residency=")).map(str::to_owned)
    };
    let of = |gib: f64| Memories::of_device(gib * GIB);
    let mapped = Some("mapped".to_owned());
    assert_eq!([3.0, 4.0, 8.0, 20.0].map(|gib| residency(&on_cpu, of(gib))), [mapped.clone(), mapped, None, None]);
    assert_eq!(residency(&Workload { is_random: true, ..on_cpu.clone() }, of(4.0)), None, "no file to stay in");
    let on_gpu = Workload { place: place_on(DeviceKind::Cuda), ..on_cpu.clone() };
    assert_eq!([6.0, 12.0].map(|gib| residency(&on_gpu, of(gib))), [Some("host".to_owned()), None]);
    // The blocks take 13 GiB of the host's memory, in codes 4.
    let beside = |host: f64| that_fit(&on_gpu, Memories { host_bytes: Some(host * GIB), ..of(6.0) });
    assert!(beside(8.0)[0].settings.starts_with("model.quantization=nf4 model.residency=host"), "{:?}", beside(8.0));
    assert_eq!(beside(4.0), []);
    let (config, selection) = memory::model(include_str!("../../../../configs/llama-3.1-70b.json"), 8);
    let on_gpu = Workload { config: &config, selection: &selection, ..on_gpu };
    // 129 GiB of blocks beside a GPU of 24 are not usual.
    let first = |host_bytes| that_fit(&on_gpu, Memories { host_bytes, ..of(24.0) }).remove(0).settings;
    assert!(first(None).starts_with("model.quantization=nf4 model.residency=host"), "{}", first(None));
    assert!(first(Some(200.0 * GIB)).starts_with("model.residency=host"), "{}", first(Some(200.0 * GIB)));
    let least = (10..30).map(|tenths| that_fit(&on_cpu, of(f64::from(tenths) / 10.0))).find(|found| !found.is_empty());
    let least = &least.unwrap()[0].settings;
    assert!(least.starts_with("model.quantization=nf4 model.residency=mapped"), "{least}");
}

#[test]
fn where_nothing_helps_that_is_said() {
    let (config, selection) = model();
    let text = shortage(&workload(&config, &selection), Memories::of_device(1e8), "this machine").unwrap();
    assert!(text.ends_with("a shorter data.max_length, a smaller model or a larger device"), "{text}");
    let (config, selection) = memory::model(include_str!("../../../../configs/smollm2-135m.json"), 100_000);
    let short = Workload { rows: 1, row_length: 64, ..workload(&config, &selection) };
    let text = shortage(&short, Memories::of_device(1e8), "this machine").unwrap();
    assert!(text.ends_with("take a smaller lora.r, or fewer lora.target_modules"), "{text}");
}
