//! A file system in memory that fails, fills up, crashes and loses power on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::export::spool::files::{Files, SpoolFile};

/// What happens to one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It fails; a write leaves so many of its bytes.
    Io(usize),
    /// The same, for want of space.
    NoSpace(usize),
    /// The process dies in it, after so many bytes of a write.
    Crash(usize),
}

/// The file system. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Model(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct State {
    names: BTreeMap<String, usize>,
    /// The names that a loss of power leaves.
    durable: BTreeMap<String, usize>,
    /// By number; never removed, since open files outlast their names.
    files: Vec<Node>,
    /// Faults by the number of the operation, counted from the next one.
    faults: BTreeMap<u64, Fault>,
    operations: u64,
    reads: u64,
    /// How many reads fail from now on.
    unreadable: u64,
    /// Bytes of all files together.
    capacity: Option<usize>,
    /// Starts of the process. What an earlier one opened is of no use.
    life: u64,
    dead: bool,
    /// Whether writes wait.
    closed: bool,
}

#[derive(Debug, Default, Clone)]
struct Node {
    data: Vec<u8>,
    synced: Vec<u8>,
    /// What a failed sync has lost: later ones claim what they don't do.
    lost: Range<usize>,
}

#[derive(Debug)]
struct Handle {
    model: Model,
    node: usize,
    life: u64,
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl State {
    /// Counts an operation that changes something, and says what is wrong with it.
    fn operation(&mut self) -> Option<Fault> {
        if self.dead {
            return Some(Fault::Crash(0));
        }
        let fault = self.faults.remove(&self.operations);
        self.operations += 1;
        self.dead |= matches!(fault, Some(Fault::Crash(_)));
        fault
    }

    fn check(&mut self) -> io::Result<()> {
        self.operation().map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn size(&self) -> usize {
        self.names.values().map(|node| self.files[*node].data.len()).sum()
    }
}

impl Fault {
    fn error(self) -> io::Error {
        match self {
            Self::Io(_) => io::Error::other("the disk is broken"),
            Self::NoSpace(_) => io::ErrorKind::StorageFull.into(),
            Self::Crash(_) => dead(),
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Io(bytes) | Self::NoSpace(bytes) | Self::Crash(bytes) => bytes,
        }
    }
}

impl Model {
    /// What becomes of an operation to come, counted from 0.
    pub(super) fn fault(&self, after: u64, fault: Fault) {
        let mut state = self.0.state.lock();
        let at = state.operations + after;
        state.faults.insert(at, fault);
    }

    pub(super) fn set_capacity(&self, bytes: Option<usize>) {
        self.0.state.lock().capacity = bytes;
    }

    pub(super) fn is_dead(&self) -> bool {
        self.0.state.lock().dead
    }

    pub(super) fn reads(&self) -> u64 {
        self.0.state.lock().reads
    }

    /// So many reads fail from now on.
    pub(super) fn fail_reads(&self, count: u64) {
        self.0.state.lock().unreadable = count;
    }

    /// How much the files take.
    pub(super) fn size(&self) -> usize {
        self.0.state.lock().size()
    }

    /// Writes wait until they are let through.
    pub(super) fn hold_writes(&self) {
        self.0.state.lock().closed = true;
    }

    pub(super) fn let_writes_through(&self) {
        self.0.state.lock().closed = false;
        self.0.opened.notify_all();
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.0.state.lock().names.keys().cloned().collect()
    }

    pub(super) fn content(&self, name: &str) -> Vec<u8> {
        let state = self.0.state.lock();
        state.files[state.names[name]].data.clone()
    }

    /// Puts a file there, synced.
    pub(super) fn put(&self, name: &str, data: Vec<u8>) {
        let mut state = self.0.state.lock();
        let node = state.files.len();
        state.files.push(Node { synced: data.clone(), data, lost: 0..0 });
        state.names.insert(name.to_owned(), node);
        state.durable.insert(name.to_owned(), node);
    }

    /// The process dies, if it hasn't, and starts again.
    pub(super) fn restart(&self) {
        let mut state = self.0.state.lock();
        state.life += 1;
        state.dead = false;
        state.faults.clear();
    }

    /// The machine dies, too: what isn't synced is there or not, as chance has it.
    pub(super) fn lose_power(&self, random: &mut fastrand::Rng) {
        let mut state = self.0.state.lock();
        let all: BTreeSet<String> = state.names.keys().chain(state.durable.keys()).cloned().collect();
        for name in all {
            let (now, durable) = (state.names.get(&name).copied(), state.durable.get(&name).copied());
            let kept = if random.bool() { now } else { durable };
            match kept {
                Some(node) => drop(state.names.insert(name, node)),
                None => drop(state.names.remove(&name)),
            }
        }
        for node in &mut state.files {
            if !node.lost.is_empty() {
                node.data.clone_from(&node.synced);
            } else if node.data.starts_with(&node.synced) {
                let synced = node.synced.len();
                node.data.truncate(random.usize(synced..=node.data.len()));
                if random.u8(0..3) == 0 {
                    let from = random.usize(synced..=node.data.len());
                    let to = random.usize(from..=node.data.len());
                    node.data[from..to].fill(0);
                }
            } else if random.bool() {
                node.data.clone_from(&node.synced);
            }
            node.synced.clone_from(&node.data);
            node.lost = 0..0;
        }
        state.durable = state.names.clone();
    }

    fn handle(&self, state: &State, node: usize) -> Box<dyn SpoolFile> {
        Box::new(Handle { model: self.clone(), node, life: state.life })
    }

    fn no_such_file() -> io::Error {
        io::ErrorKind::NotFound.into()
    }
}

impl Files for Model {
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let state = self.0.state.lock();
        let list =
            state.names.iter().map(|(name, node)| (name.clone(), state.files[*node].data.len() as u64));
        Ok(list.collect())
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn SpoolFile>> {
        let mut state = self.0.state.lock();
        state.check()?;
        if state.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let node = state.files.len();
        state.files.push(Node::default());
        state.names.insert(name.to_owned(), node);
        Ok(self.handle(&state, node))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn SpoolFile>> {
        let state = self.0.state.lock();
        let node = *state.names.get(name).ok_or_else(Self::no_such_file)?;
        Ok(self.handle(&state, node))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.state.lock();
        state.check()?;
        let node = state.names.remove(from).ok_or_else(Self::no_such_file)?;
        state.names.insert(to.to_owned(), node);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.0.state.lock();
        state.check()?;
        state.names.remove(name).map(drop).ok_or_else(Self::no_such_file)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.state.lock();
        state.check()?;
        state.durable = state.names.clone();
        Ok(())
    }
}

impl SpoolFile for Handle {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.model.0.state.lock();
        while state.closed {
            self.model.0.opened.wait(&mut state);
        }
        if state.life != self.life {
            return Err(dead());
        }
        let was_dead = state.dead;
        let free = state.capacity.map_or(usize::MAX, |capacity| capacity.saturating_sub(state.size()));
        let fault = state.operation().or((free < bytes.len()).then_some(Fault::NoSpace(usize::MAX)));
        let written = fault.map_or(bytes.len(), |fault| fault.bytes().min(bytes.len()).min(free));
        if !was_dead {
            state.files[self.node].data.extend_from_slice(&bytes[..written]);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let mut state = self.model.0.state.lock();
        if state.life != self.life {
            return Err(dead());
        }
        if state.files[self.node].lost.is_empty() || state.dead {
            // A disk that has just lost what was to be synced and keeps what was to be cut isn't survived.
            state.check()?;
        }
        let (length, node) = (usize::try_from(length).unwrap(), &mut state.files[self.node]);
        node.data.truncate(length);
        node.lost = node.lost.start.min(length)..node.lost.end.min(length);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.model.0.state.lock();
        if state.life != self.life {
            return Err(dead());
        }
        let checked = state.check();
        let dead = state.dead;
        let node = &mut state.files[self.node];
        if checked.is_ok() {
            node.synced.clone_from(&node.data);
            let lost = node.lost.clone();
            node.synced[lost].fill(0);
        } else if !dead {
            node.lost = node.synced.len().min(node.data.len())..node.data.len();
        }
        checked
    }

    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut state = self.model.0.state.lock();
        if state.life != self.life {
            return Err(dead());
        }
        state.reads += 1;
        if state.unreadable > 0 {
            state.unreadable -= 1;
            return Err(Fault::Io(0).error());
        }
        let data = &state.files[self.node].data;
        let rest = data.get(usize::try_from(at).unwrap()..).unwrap_or_default();
        let read = rest.len().min(buffer.len());
        buffer[..read].copy_from_slice(&rest[..read]);
        Ok(read)
    }
}
