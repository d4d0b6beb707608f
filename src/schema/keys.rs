//! The keys of a section, one row each. From the rows follow the struct, its defaults, how it is read, the names in
//! other trainers, the effect on a resumed run, and recipes/reference.toml.
//!
//! To add a key, add a row to its section's table, and use the key where it is needed.

/// The effect of changing a key's value when a run is continued from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The value affects only how long the run trains, what it writes or where it computes: every step means the same
    /// as before.
    None,
    /// Later steps are computed differently.
    LaterSteps,
    /// A place in the rows refers to other rows, so the value may change only between two epochs.
    OtherRows,
    /// A checkpoint does not have what later steps need: the value may never change.
    OtherStates,
    /// The recipe no longer describes the adapter of the checkpoint: the value may never change.
    OtherAdapter,
}

/// Names in other trainers, in lower case and with underscores, and a note if one is needed.
pub type Names = (&'static [&'static str], Option<&'static str>);

/// A key of a section.
#[derive(Clone, Copy, Debug)]
pub struct KeyRow {
    /// Its name.
    pub name: &'static str,
    /// What it means, one or more lines.
    pub sentence: &'static str,
    /// Its default as TOML; `None` where it has none.
    pub default: fn() -> Option<toml::Value>,
    /// An example value as TOML, where the default does not show one. For a list of sections: one of them as an inline
    /// table.
    pub example: Option<&'static str>,
    /// The keys below it, if it is a section or a list of sections.
    pub keys: &'static [KeyRow],
    /// The effect of another value on a continued run; if absent, the row of its section or the rows of its keys have it.
    pub effect: Option<Effect>,
    /// Whether another value may give a finished run more steps.
    pub adds_steps: bool,
    /// Its names in other trainers.
    pub peers: &'static [Names],
}

/// Names that other trainers use for one of our keys.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Spellings of the name.
    pub names: &'static [&'static str],
    /// Section or sections of our key (`lora`, `data.train`; empty for the top).
    pub section: String,
    /// Our key; absent where there is no such key and `note` says what to do instead.
    pub key: Option<&'static str>,
    /// An additional note for the user.
    pub note: Option<&'static str>,
}

/// The rows from the top down to a key: for `data.train[0].path`, the rows of `data`, `train` and `path`.
#[must_use]
pub fn rows_to(rows: &'static [KeyRow], key: &str) -> Vec<&'static KeyRow> {
    let mut below = rows;
    let row = |part: &str| {
        let name = part.split('[').next().unwrap_or(part);
        let row = below.iter().find(|row| row.name == name)?;
        below = row.keys;
        Some(row)
    };
    key.split('.').map_while(row).collect()
}

/// Other trainers' names for the keys of a section; its own keys come before those of the sections below it.
#[must_use]
pub fn peers(rows: &'static [KeyRow], section: &str) -> Vec<Peer> {
    let peer =
        |row: &KeyRow, (names, note): &Names| Peer { names, section: section.into(), key: Some(row.name), note: *note };
    let own = rows.iter().flat_map(|row| row.peers.iter().map(move |names| peer(row, names)));
    let name = |row: &KeyRow| if section.is_empty() { row.name.to_owned() } else { format!("{section}.{}", row.name) };
    own.chain(rows.iter().flat_map(|row| peers(row.keys, &name(row)))).collect()
}

/// Generates a section of a recipe from its rows. A row has the sentence, which is also the comment in
/// recipes/reference.toml; name, type and default; the method of [`Section`](super::Section) that reads the key, and the
/// method's arguments after name and default; `like` with an example, where the default does not show one; `for` with
/// the values of the section's key `name` that use it, where some do not; `of` with the type of a section below; the effect of another value on a continued run (see [`Effect`]), with `+ steps` where it may
/// add steps; names in other trainers, some with a note.
///
/// `then check` names a method that checks the values after reading, and `with` adds fields that are not keys.
macro_rules! section {
    (
        $(#[$meta:meta])*
        pub struct $Section:ident $(then $check:ident)? {
            $($(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr => $reader:ident($($argument:expr),*)
                $(like $example:tt)? $(for $of:tt)? $(of $below:ty)?
                $(, $effect:ident $(+ $steps:ident)?)?
                $(, [$($peer:literal),+ $(; $note:literal)?])*;)+
        }
        $(with { $($(#[$more_meta:meta])+ pub $more:ident: $more_type:ty,)+ })?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $Section {
            $($(#[doc = $doc])+ pub $name: $type,)+
            $($($(#[$more_meta])+ pub $more: $more_type,)+)?
        }

        impl Default for $Section {
            fn default() -> Self {
                Self { $($name: $default,)+ $($($more: <$more_type>::default(),)+)? }
            }
        }

        impl $crate::schema::Keys for $Section {
            const ROWS: &'static [$crate::schema::KeyRow] = &[$($crate::schema::KeyRow {
                name: stringify!($name),
                sentence: concat!($($doc, "\n"),+),
                default: || toml::Value::try_from::<$type>($default).ok(),
                example: $crate::schema::section!(@option $(stringify!($example))?),
                keys: $crate::schema::section!(@rows $($below)?),
                effect: $crate::schema::section!(@option $($crate::schema::Effect::$effect)?),
                adds_steps: $crate::schema::section!(@is $($($steps)?)?),
                peers: &[$((&[$($peer),+], $crate::schema::section!(@option $($note)?))),*],
            }),+];

            #[allow(clippy::float_cmp, reason = "whether a number is the default")]
            fn read(section: &mut $crate::schema::Section<'_>, default: Self) -> Self {
                let read = Self {
                    $($name: section.$reader(stringify!($name), default.$name $(, $argument)*),)+
                    $($($more: default.$more,)+)?
                };
                $($({
                    let default: $type = $default;
                    if read.$name != default && !$of.contains(&read.name) {
                        section.of_no_use(stringify!($name), $crate::schema::Choice::word(read.name));
                    }
                })?)+
                read$(.$check(section))?
            }
        }
    };
    (@option) => { None };
    (@option $value:expr) => { Some($value) };
    (@is) => { false };
    (@is $steps:ident) => { true };
    (@rows) => { &[] };
    (@rows $below:ty) => { <$below as $crate::schema::Keys>::ROWS };
}

pub(crate) use section;
