use super::*;

fn moments() -> Vec<HostTensor> {
    vec![
        HostTensor {
            name: "a.exp_avg".into(),
            shape: vec![2, 3],
            values: HostValues::F32(vec![0.1, -0.0, 1e-38, 3.0, f32::MAX, 0.3]),
        },
        HostTensor { name: "b.exp_avg".into(), shape: vec![1], values: HostValues::F32(vec![1.0 / 3.0]) },
        HostTensor { name: "c.state1".into(), shape: vec![3, 1], values: HostValues::U8(vec![0, 127, 255]) },
    ]
}

fn adapter(folder: &Path) -> io::Result<()> {
    fs::write(folder.join("adapter_model.safetensors"), b"adapter")
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn newest_good(checkpoints: &Checkpoints) -> Option<PathBuf> {
    let found = checkpoints.newest_good().unwrap();
    assert!(found.damaged.is_empty(), "{:?}", found.damaged);
    found.checkpoint
}

#[test]
fn what_was_saved_is_loaded_bit_for_bit() {
    let run = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
    assert_eq!(newest_good(&checkpoints), None);
    let path = checkpoints.save(500, adapter, &moments(), &vec![7, 8], "").unwrap();
    assert_eq!(path, run.path().join("checkpoints/step-000500"));
    assert_eq!(
        names(&path),
        ["SHA256SUMS", "adapter_model.safetensors", "optimizer.safetensors", "resolved.toml", "trainer_state.json"]
    );
    assert_eq!(newest_good(&checkpoints), Some(path.clone()));
    let bits = |tensors: &[HostTensor]| -> Vec<u32> {
        tensors.iter().flat_map(|tensor| tensor.values.numbers().iter().map(|value| value.to_bits())).collect()
    };
    let loaded = load_moments(&path).unwrap();
    assert_eq!(loaded, moments());
    assert_eq!(bits(&loaded), bits(&moments()));
    assert_eq!(load_state::<Vec<u32>>(&path).unwrap(), [7, 8]);
}

#[test]
fn rotation_keeps_the_newest() {
    let run = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { save_steps: Some(10), save_total_limit: Some(2), ..CheckpointConfig::default() };
    let checkpoints = Checkpoints::new(run.path(), &config);
    for step in [10, 20, 30, 40] {
        let newest = checkpoints.save(step, adapter, &moments(), &step, "").unwrap();
        checkpoints.rotate(&[&newest]).unwrap();
    }
    assert_eq!(names(&run.path().join("checkpoints")), ["step-000030", "step-000040"]);
    // A checkpoint in `keep` is kept in addition.
    let kept = run.path().join("checkpoints/step-000030");
    for step in [50, 60] {
        let newest = checkpoints.save(step, adapter, &moments(), &step, "").unwrap();
        checkpoints.rotate(&[&newest, &kept]).unwrap();
    }
    assert_eq!(names(&run.path().join("checkpoints")), ["step-000030", "step-000050", "step-000060"]);
    let before = |step: u64| checkpoints.newest_that(|path| load_state::<u64>(path).unwrap() < step).unwrap();
    assert_eq!(
        (before(60), before(50), before(30)),
        (Some(run.path().join("checkpoints/step-000050")), Some(kept), None)
    );
}

#[test]
fn a_process_that_ends_while_a_checkpoint_is_deleted_leaves_none_that_is_not_whole() {
    let run = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { save_steps: Some(10), save_total_limit: Some(1), ..CheckpointConfig::default() };
    let checkpoints = Checkpoints::new(run.path(), &config);
    let half = |step: u64| {
        let folder = checkpoints.folder().join(format!(".step-{step:06}.deleted"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("trainer_state.json"), "10").unwrap();
    };
    let first = checkpoints.save(10, adapter, &moments(), &10, "").unwrap();
    half(10);
    half(7);
    assert_eq!(checkpoints.list().unwrap(), [(10, first)], "what is being deleted is no checkpoint");
    let second = checkpoints.save(20, adapter, &moments(), &20, "").unwrap();
    half(10);
    checkpoints.rotate(&[&second]).unwrap();
    assert_eq!(names(checkpoints.folder()), ["step-000020"]);
    half(10);
    assert!(checkpoints.set_aside_after(20).unwrap().is_empty());
    assert_eq!(names(checkpoints.folder()), ["step-000020"], "a run that continues sweeps up");
}

#[test]
fn a_failed_save_leaves_the_older_checkpoints_and_nothing_that_looks_like_a_new_one() {
    let run = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { save_steps: Some(10), save_total_limit: Some(1), ..CheckpointConfig::default() };
    let checkpoints = Checkpoints::new(run.path(), &config);
    let first = checkpoints.save(10, adapter, &moments(), &10, "").unwrap();
    // Three values do not fill a shape of two: the second save fails after the adapter was written.
    let broken = [HostTensor { name: "a".into(), shape: vec![2], values: HostValues::F32(vec![1.0, 2.0, 3.0]) }];
    let error = checkpoints.save(20, adapter, &broken, &20, "").unwrap_err();
    assert!(error.to_string().contains("tensor `a`"), "{error}");
    assert_eq!(checkpoints.list().unwrap(), [(10, first)]);
    assert_eq!(names(&run.path().join("checkpoints")), ["step-000010"], "a full disk needs the room");
    let second = checkpoints.save(20, adapter, &moments(), &20, "").unwrap();
    checkpoints.rotate(&[&second]).unwrap();
    assert_eq!(checkpoints.list().unwrap(), [(20, second)]);
    assert_eq!(names(&run.path().join("checkpoints")), ["step-000020"]);
}

#[test]
fn saving_a_step_again_replaces_it() {
    let run = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
    checkpoints.save(10, adapter, &moments(), &1, "").unwrap();
    let path = checkpoints.save(10, adapter, &moments(), &2, "").unwrap();
    assert_eq!(load_state::<u32>(&path).unwrap(), 2);
    assert_eq!(names(&run.path().join("checkpoints")), ["step-000010"]);
}

#[test]
fn a_damaged_newest_checkpoint_is_noticed_and_the_one_before_it_found() {
    let run = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
    let paths = [10, 20, 30].map(|step| checkpoints.save(step, adapter, &moments(), &step, "").unwrap());
    // What a bad sector, or a copy that was cut short, leaves.
    let file = paths[2].join(OPTIMIZER_FILE);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 0x40;
    fs::write(&file, bytes).unwrap();
    fs::remove_file(paths[1].join("adapter_model.safetensors")).unwrap();
    let found = checkpoints.newest_good().unwrap();
    assert_eq!(found.checkpoint, Some(paths[0].clone()));
    let told: Vec<String> = found.damaged.iter().map(ToString::to_string).collect();
    assert!(told[0].contains("step-000030: optimizer.safetensors is damaged"), "{told:?}");
    assert!(told[1].contains("step-000020: adapter_model.safetensors is missing"), "{told:?}");
}

#[test]
fn a_process_that_ends_while_a_checkpoint_is_replaced_loses_neither() {
    let run = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
    let path = checkpoints.save(10, adapter, &moments(), &1, "").unwrap();
    let replaced = checkpoints.folder().join(".step-000010.replaced");
    fs::rename(&path, &replaced).unwrap();
    fs::create_dir(checkpoints.folder().join(".step-000010.partial")).unwrap();
    fs::create_dir(checkpoints.folder().join(".step-000007.partial")).unwrap();
    assert_eq!(newest_good(&checkpoints), Some(replaced));
    assert_eq!(checkpoints.save(10, adapter, &moments(), &2, "").unwrap(), path);
    assert_eq!(newest_good(&checkpoints), Some(path));
    assert_eq!(names(checkpoints.folder()), ["step-000010"], "what was cut short is gone");
}

#[test]
fn later_checkpoints_are_set_aside() {
    let run = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(run.path(), &CheckpointConfig::default());
    for step in [10, 20, 30] {
        checkpoints.save(step, adapter, &moments(), &step, "").unwrap();
    }
    assert_eq!(checkpoints.set_aside_after(10).unwrap().len(), 2);
    assert_eq!(
        names(&run.path().join("checkpoints")),
        ["step-000010", "superseded-step-000020", "superseded-step-000030"]
    );
    assert_eq!(checkpoints.list().unwrap().len(), 1);
}

#[test]
fn a_folder_that_is_no_checkpoint_is_refused_by_name() {
    let run = tempfile::tempdir().unwrap();
    let error = load_state::<u32>(run.path()).unwrap_err().to_string();
    assert!(error.contains("not a checkpoint") && error.contains("step-000500"), "{error}");
    fs::write(run.path().join(STATE_FILE), "{\"step\": ").unwrap();
    let error = load_state::<u32>(run.path()).unwrap_err().to_string();
    assert!(error.contains("trainer_state.json"), "{error}");
}
