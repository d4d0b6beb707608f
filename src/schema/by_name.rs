//! A table of names with a value each, of which the order counts.

use std::ops::Index;

use serde::{Serialize, Serializer};

/// Values by name, in the order in which they are written.
#[derive(Clone, Debug, PartialEq)]
pub struct ByName<T>(Vec<(String, T)>);

impl<T> Default for ByName<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> ByName<T> {
    /// The number of names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.0.iter().map(|(name, _)| name)
    }

    /// The values.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }

    /// Leaves the names that `keeps` says.
    pub fn retain(&mut self, keeps: impl Fn(&String) -> bool) {
        self.0.retain(|(name, _)| keeps(name));
    }

    /// The same values by other names.
    #[must_use]
    pub fn renamed(self, change: impl Fn(&String) -> String) -> Self {
        Self(self.0.into_iter().map(|(name, value)| (change(&name), value)).collect())
    }

    /// `change` of each value.
    pub fn map<U>(&self, change: impl Fn(&T) -> U) -> ByName<U> {
        ByName(self.0.iter().map(|(name, value)| (name.clone(), change(value))).collect())
    }
}

impl<T> FromIterator<(String, T)> for ByName<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl<T> Index<&str> for ByName<T> {
    type Output = T;

    /// # Panics
    /// If there is no such name.
    fn index(&self, name: &str) -> &T {
        let found = self.0.iter().find(|(other, _)| other == name);
        found.map_or_else(|| panic!("no `{name}`"), |(_, value)| value)
    }
}

impl<T: Serialize> Serialize for ByName<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}
