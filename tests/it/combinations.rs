//! Several adapters as one, compared with PEFT's `add_weighted_adapter`.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum as _;
use lora_train::config::{LoraConfig, TargetModules};
use lora_train::device::Dtype;
use lora_train::lora::Matrices;
use lora_train::lora::combine::{Combination, CombinationType, MajoritySign};
use lora_train::model::weights::WeightFiles;
use lora_train::save::export::{
    AdapterWeights, HostMatrix, MergeOptions, combine, merge, read_adapter, write_adapter, write_combined,
};
use lora_train::spec::ModelConfig;
use serde_json::Value;

use crate::common::families::formula;
use crate::common::{quickstart_model, run, stderr};
use crate::golden::{compare_projections, lora_config};

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/combinations/golden.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn model() -> ModelConfig {
    ModelConfig::from_file(&quickstart_model().join("config.json")).unwrap()
}

/// Writes an adapter of these settings, whose numbers follow from its name.
fn write(folder: &Path, name: &str, config: &LoraConfig) -> PathBuf {
    let (model, mut weights) = (model(), AdapterWeights::default());
    for (layer, site, shape) in config.select(&model).unwrap().iter() {
        let module = model.module_name(layer, site);
        let matrices = shape.kind.shapes(shape.r, model.blocks[layer].sites[site].shape).zip(Matrices::NAMES);
        let matrix = |([num_rows, num_columns], matrix): ([usize; 2], &str)| {
            let values = formula(&format!("base_model.model.{module}.{matrix}.{name}.weight"), 0.2);
            HostMatrix { num_rows, num_columns, values: values.take(num_rows * num_columns).collect() }
        };
        let matrices = matrices.map(matrix);
        weights.insert(module, matrices);
    }
    let folder = folder.join(name);
    write_adapter(&folder, &weights, config, quickstart_model().to_str().unwrap()).unwrap();
    folder
}

/// The golden adapters, with their weights.
fn adapters(golden: &Value, folder: &Path) -> Vec<(PathBuf, f64)> {
    let of = |(name, lora): (&String, &Value)| write(folder, name, &lora_config(lora));
    let folders = golden["adapters"].as_object().unwrap().iter().map(of);
    folders.zip(golden["weights"].as_array().unwrap().iter().map(|weight| weight.as_f64().unwrap())).collect()
}

fn combination(name: &str, settings: &Value) -> Combination {
    let by_frequency = settings["majority_sign_method"] == "frequency";
    Combination {
        kind: CombinationType::from_str(name.split(' ').next().unwrap(), false).unwrap(),
        density: settings["density"].as_f64().unwrap_or(1.0),
        majority_sign: if by_frequency { MajoritySign::Frequency } else { MajoritySign::Total },
        svd_rank: settings["svd_rank"].as_u64().map(|rank| usize::try_from(rank).unwrap()),
        seed: 0,
    }
}

/// With zeros up to this rank, as PEFT writes them.
fn padded(matrix: &HostMatrix, [rows, columns]: [usize; 2]) -> Vec<f32> {
    let of_row = |row: &[f32]| [row, &vec![0.0; columns - row.len()]].concat();
    let mut values: Vec<f32> = matrix.values.chunks_exact(matrix.num_columns).flat_map(of_row).collect();
    values.resize(rows * columns, 0.0);
    values
}

fn product(pair: &Matrices<HostMatrix>) -> Vec<f32> {
    let (a, b) = (&pair.a, &pair.b);
    let element = |row: usize, column: usize| -> f32 {
        (0..a.num_rows).map(|k| b.values[row * a.num_rows + k] * a.values[k * a.num_columns + column]).sum()
    };
    (0..b.num_rows).flat_map(|row| (0..a.num_columns).map(move |column| element(row, column))).collect()
}

#[test]
fn every_type_makes_of_two_adapters_what_peft_makes_of_them() {
    let (golden, folder) = (golden(), tempfile::tempdir().unwrap());
    let adapters = adapters(&golden, folder.path());
    let all = golden["combinations"].as_object().unwrap();
    assert_eq!(all.len(), 9);
    for (index, (name, expected)) in all.iter().enumerate() {
        let combined = combine(&adapters, &combination(name, &expected["settings"]), &quickstart_model()).unwrap();
        let r = usize::try_from(expected["r"].as_u64().unwrap()).unwrap();
        let (tensors, mut num_found) = (expected["tensors"].as_object().unwrap(), 0);
        for (module, pair) in &*combined.adapter.weights {
            let module = format!("base_model.model.{module}");
            let (in_features, out_features) = (pair.a.num_columns, pair.b.num_rows);
            let found = match tensors.get(&module) {
                Some(_) => vec![(module, product(pair))],
                None => vec![
                    (format!("{module}.lora_A"), padded(&pair.a, [r, in_features])),
                    (format!("{module}.lora_B"), padded(&pair.b, [out_features, r])),
                ],
            };
            for (key, values) in &found {
                compare_projections(key, values, 1.0, &tensors[key], 1e-5);
            }
            num_found += found.len();
        }
        assert_eq!(num_found, tensors.len(), "{name}");
        // What is written has the scale and the ranks of what was made.
        let out = folder.path().join(index.to_string());
        write_combined(&out, &combined, "base").unwrap();
        let read = read_adapter(&out).unwrap();
        assert_eq!(read.weights, combined.adapter.weights, "{name}");
        for (_, _, shape) in read.config.select(&model()).unwrap().iter() {
            assert!((shape.scale - 1.0).abs() < 1e-12, "{name}");
        }
    }
}

#[test]
fn the_largest_rank_of_all_adapters_is_that_of_every_module_as_in_peft() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, r: usize, modules: &[&str], rank_pattern: &[(&str, usize)]| {
        let target_modules = TargetModules::Names(modules.iter().map(ToString::to_string).collect());
        let rank_pattern = rank_pattern.iter().map(|(name, r)| ((*name).to_owned(), *r)).collect();
        write(folder.path(), name, &LoraConfig { r, target_modules, rank_pattern, ..LoraConfig::default() })
    };
    let two = ["q_proj", "down_proj"];
    for (name, first, rank) in [
        ("plain", of("first", 5, &["q_proj"], &[]), 5),
        ("pattern", of("second", 2, &["q_proj", "k_proj"], &[("k_proj", 6)]), 6),
    ] {
        let adapters = [(first, 1.0), (of("third", 2, &two, &[]), 1.0), (of("fourth", 3, &two, &[]), 1.0)];
        let settings = serde_json::json!({});
        let all =
            |kind| combine(&adapters, &combination(kind, &settings), &quickstart_model()).unwrap().adapter.weights;
        let (svd, exact) = (all("svd"), all("cat"));
        assert!(svd.values().all(|pair| pair.a.num_rows == rank), "{name}");
        // Five ranks are enough for the sum of two and three.
        for (found, sum) in svd.iter().zip(exact.iter()).filter(|((module, _), _)| module.ends_with("down_proj")) {
            let far = product(found.1).iter().zip(product(sum.1)).fold(0.0_f32, |far, (a, b)| far.max((a - b).abs()));
            assert!(far < 1e-4, "{name} {}: {far}", found.0);
        }
    }
}

#[test]
fn a_plain_copy_has_one_rank_and_one_scale_and_the_products_of_the_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let config = LoraConfig {
        r: 2,
        lora_alpha: 7.0,
        use_rslora: true,
        target_modules: TargetModules::Names(["q_proj", "k_proj", "down_proj"].map(str::to_owned).into()),
        rank_pattern: [("k_proj".to_owned(), 6)].into_iter().collect(),
        alpha_pattern: [("down_proj".to_owned(), 3.0)].into_iter().collect(),
        ..LoraConfig::default()
    };
    let (adapter, out, model) = (write(folder.path(), "own", &config), folder.path().join("plain"), quickstart_model());
    let [from, to, base] = [&adapter, &out, &model].map(|path| path.to_str().unwrap());
    let command = || run(&["export", "--plain", from, to, "--model", base]);
    let output = command();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("rank 6 and scale 1 everywhere"), "{}", stderr(&output));
    let [own, plain] = [&adapter, &out].map(|folder| read_adapter(folder).unwrap());
    assert!(plain.config.is_plain() && !plain.config.use_rslora && !own.config.is_plain());
    let shapes = |config: &LoraConfig| {
        let model = self::model();
        let shapes = config.select(&model).unwrap();
        shapes.iter().map(|(layer, site, shape)| (model.module_name(layer, site), shape)).collect::<Vec<_>>()
    };
    for ((module, before), (_, after)) in shapes(&own.config).iter().zip(shapes(&plain.config)) {
        assert_eq!((after.r, after.scale), (6, 1.0), "{module}");
        let [before_products, after] = [&own, &plain].map(|adapter| product(&adapter.weights[module]));
        for (before_product, after) in before_products.iter().zip(after) {
            let before = f64::from(*before_product) * before.scale;
            assert!((before - f64::from(after)).abs() <= 1e-6 * (1.0 + before.abs()), "{module}: {before} {after}");
        }
    }
    assert!(stderr(&command()).contains("exists and is not empty"));
    let refused = run(&["export", from, to]);
    assert!(refused.status.code() == Some(2) && stderr(&refused).contains("--plain"), "{}", stderr(&refused));
}

#[test]
fn adapters_beside_each_other_are_merged_as_one_after_the_other() {
    let (golden, folder) = (golden(), tempfile::tempdir().unwrap());
    let adapters = adapters(&golden, folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let base = quickstart_model();
    let names: Vec<&str> = adapters.iter().map(|(folder, _)| folder.to_str().unwrap()).collect();
    let cat = ["--combination-type", "cat", "--weights", "-0.4,1", "--model", base.to_str().unwrap()];
    let command = |more: &[&str]| {
        let output = run(&[&["merge"], &names[..], &cat, more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let said = command(&["--out", &path("merged"), "--dtype", "f32"]);
    assert!(said.contains("-0.4 first + 1 second (cat, rank 8)"), "{said}");
    command(&["--out", &path("both"), "--adapter-only"]);
    let both = ["merge", &path("both"), "--out", &path("again"), "--dtype", "f32"];
    assert!(run(&both).status.success());
    let bytes = |name: &str| fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    assert!(bytes("merged") == bytes("again"));

    let load = |folder: &Path, name: &str| {
        let files = WeightFiles::open(folder).unwrap();
        files.load_f32(name, &files.tensors()[name].shape.clone()).unwrap()
    };
    let options = MergeOptions { dtype: Some(Dtype::F32), ..MergeOptions::default() };
    let alone = adapters.iter().map(|(adapter, _)| {
        let out = adapter.with_extension("alone");
        merge(&base, adapter, &out, options, &|_, _| ()).unwrap();
        out
    });
    let alone: Vec<PathBuf> = alone.collect();
    for module in ["self_attn.k_proj", "self_attn.q_proj", "mlp.down_proj", "mlp.up_proj"] {
        let name = format!("model.layers.2.{module}.weight");
        let (whole, merged) = (load(&base, &name), load(&folder.path().join("merged"), &name));
        let [first, second] = [0, 1].map(|index| load(&alone[index], &name));
        for (index, merged) in merged.iter().enumerate() {
            let expected = whole[index] - 0.4 * (first[index] - whole[index]) + (second[index] - whole[index]);
            assert!((merged - expected).abs() < 1e-5, "{name}: {merged}, expected {expected}");
        }
    }
}

#[test]
fn what_cannot_be_combined_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let config = |r: usize, use_dora: bool| LoraConfig { r, use_dora, ..LoraConfig::default() };
    for (name, config) in [("four", config(4, false)), ("also", config(4, false)), ("eight", config(8, false))] {
        write(folder.path(), name, &config);
    }
    write(folder.path(), "dora", &config(4, true));
    for (names, more, message) in [
        (&["four", "also"][..], &[][..], "2 adapters need --weights"),
        (&["four", "also"], &["--weights", "1"], "--weights has 1, and there are 2 adapters"),
        (&["four"], &["--weights", "1,2"], "--weights has 2, and there is 1 adapter"),
        (&["four", "also"], &["--weights", "1,nan"], "NaN is no weight"),
        (&["four", "also"], &["--weights", "1,x"], "invalid value 'x'"),
        (&["four", "also"], &["--weights", "1,1", "--combination-type", "sum"], "invalid value 'sum'"),
        (&["four", "also"], &["--weights", "1,1", "--combination-type", "ties"], "ties needs --density"),
        (&["four", "also"], &["--weights", "1,1", "--density", "0.5"], "no meaning with --combination-type svd"),
        (
            &["four", "also"],
            &["--weights", "1,1", "--combination-type", "dare_ties", "--density", "0"],
            "--density 0, expected a number above 0 and at most 1",
        ),
        (&["four", "also"], &["--weights", "1,1", "--svd-rank", "0"], "--svd-rank 0, expected a rank"),
        (&["four", "eight"], &["--weights", "1,1", "--combination-type", "linear"], "has rank 4 in"),
        (&["four", "dora"], &["--weights", "1,1"], "what an adapter with `use_dora` changes"),
        (&["four"], &["--adapter-only"], "--adapter-only is for a GGUF file"),
        (&["four", "four"], &["--weights", "1,1"], "two adapters are called `four`"),
    ] {
        let names: Vec<String> = names.iter().map(|name| folder.path().join(name).display().to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let out = folder.path().join("out");
        let output = run(&[&["merge"], &names[..], more, &["--out", out.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(2), "{message}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{message}: {}", stderr(&output));
        assert!(!out.exists());
    }
}
