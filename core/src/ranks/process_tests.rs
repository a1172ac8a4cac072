use std::{io::Write, net::Ipv4Addr};

use pollster::block_on;

use super::*;
use crate::{
    backend::{Backend, Ops},
    cpu::CpuBackend,
    format::Products,
    ops::{AllGather, AllReduce},
    ranks::{Buf, MOST_RANKS, Ranks},
    tensor::{DType, Tensor},
};

/// A rendezvous at a free port.
fn meeting(ranks: usize) -> Rendezvous {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    Rendezvous { address: free.to_string(), rank: 0, ranks }
}

/// What `rank_0` makes of ranks whose others follow through connections, and how each of these ends.
fn across<T>(at: &Rendezvous, rank_0: impl FnOnce(Ranks) -> T) -> (T, Vec<Result<()>>) {
    thread::scope(|scope| {
        let rank = |rank| Rendezvous { rank, ..at.clone() };
        let others = (1..at.ranks).map(rank).map(|at| scope.spawn(move || follow::<CpuBackend>(&at, 0)));
        let others: Vec<_> = others.collect();
        let made = rank_0(Ranks::open_across(at, Products::default()).unwrap());
        (made, others.into_iter().map(|other| other.join().unwrap()).collect())
    })
}

fn row(b: &Ranks, columns: usize) -> Tensor<Buf> {
    Tensor::new(b.alloc("x", 4 * columns as u64).unwrap(), DType::F32, &[1, columns])
}

fn write(b: &Ranks, rank: usize, x: &Tensor<Buf>, values: &[f32]) {
    b.write_on(rank, &x.buf, 0, bytemuck::cast_slice(values)).unwrap();
}

fn values(b: &Ranks, rank: usize, x: &Tensor<Buf>) -> Result<Vec<f32>> {
    Ok(DType::F32.to_f32(&block_on(b.read_on(rank, x))?))
}

#[test]
fn processes_add_and_join_what_they_have_as_threads_do() {
    let ((), ends) = across(&meeting(3), |b| {
        let (x, sum, all) = (row(&b, 2), row(&b, 2), row(&b, 6));
        for rank in 0..3 {
            write(&b, rank, &x, &[rank as f32, 10.0]);
        }
        let tape = b
            .record(|ops| {
                ops.op(AllReduce { x: x.clone(), out: sum.clone(), accumulate: true }.into())?;
                ops.op(AllGather { x: x.clone(), out: all.clone() }.into())
            })
            .unwrap();
        b.play(&tape).unwrap();
        b.play(&tape).unwrap();
        for rank in 0..3 {
            assert_eq!(values(&b, rank, &sum).unwrap(), [6.0, 60.0], "rank {rank}");
            assert_eq!(values(&b, rank, &all).unwrap(), [0.0, 10.0, 1.0, 10.0, 2.0, 10.0], "rank {rank}");
        }
        assert!(b.free_memory().is_none_or(|free| free > 0));
    });
    ends.into_iter().for_each(|end| end.unwrap());
}

#[test]
fn long_writes_arrive_whole_and_states_are_saved_by_rank() {
    let _ = across(&meeting(2), |b| {
        let n = 1 << 20;
        let x = row(&b, n);
        let own = |rank: usize| (0..n).map(|i| (i + rank) as f32).collect::<Vec<_>>();
        (0..2).for_each(|rank| write(&b, rank, &x, &own(rank)));
        let mut saving = b.save(std::slice::from_ref(&x), 0, Box::new(vec![0; 8 * n])).unwrap();
        let saved = block_on(saving.arrive()).unwrap();
        assert_eq!(DType::F32.to_f32(&saved), [own(0), own(1)].concat());
        b.write(&x.buf, 0, &vec![0; 4 * n]).unwrap();
        b.restore(&saved, std::slice::from_ref(&x), 0).unwrap();
        assert_eq!(values(&b, 1, &x).unwrap(), own(1));
    });
}

#[test]
fn a_rank_that_fails_ends_all_with_its_reason() {
    let (error, ends) = across(&meeting(3), |b| {
        let (x, sum) = (row(&b, 1), row(&b, 1));
        // A buffer that rank 2 does not have.
        b.links.tell(&b.links.ranks[2..], &Command::Free(x.buf.0.id)).unwrap();
        b.run(|ops| ops.op(AllReduce { x, out: sum.clone(), accumulate: false }.into())).unwrap();
        values(&b, 0, &sum).unwrap_err().to_string()
    });
    assert!(error.contains("rank 2: it panicked"), "{error}");
    for end in ends {
        assert!(end.unwrap_err().to_string().contains("rank 2: it panicked"));
    }
}

#[test]
fn a_rank_does_not_end_well_if_rank_0_gives_up_before_the_first_step() {
    let ((), ends) = across(&meeting(3), |b| drop(row(&b, 1)));
    for end in ends {
        assert!(end.unwrap_err().to_string().contains("before the first step"));
    }
}

#[test]
fn a_process_that_is_gone_is_noticed() {
    let at = meeting(2);
    thread::scope(|scope| {
        let rank_1 = Rendezvous { rank: 1, ..at.clone() };
        scope.spawn(move || {
            let (commands, _) = greet::<CpuBackend>(&rank_1, Way::Commands).unwrap();
            let _meeting = greet::<CpuBackend>(&rank_1, Way::Meeting).unwrap();
            send(&commands, &(0u64, Reply::Opened("a device".into())), &[]).unwrap();
        });
        let b = Ranks::open_across(&at, Products::default()).unwrap();
        let error = b.alloc("x", 4).and_then(|buf| b.write(&buf, 0, &[0; 4])).and_then(|()| Err(b.links.ended()));
        let error = error.map(|_: ()| ()).unwrap_err().to_string();
        assert!(error.contains("rank 1: its process ended"), "{error}");
    });
}

#[test]
fn strangers_and_ranks_of_something_else_are_sent_away() {
    let at = meeting(2);
    let other = |rank, ranks| Rendezvous { rank, ranks, ..at.clone() };
    for at in [other(0, 2), other(2, 2), other(1, MOST_RANKS + 1)] {
        assert!(matches!(follow::<CpuBackend>(&at, 0), Err(Error::BadRequest(_))));
    }
    let nowhere = Rendezvous { address: "no port".into(), rank: 1, ranks: 2 };
    assert!(follow::<CpuBackend>(&nowhere, 0).unwrap_err().to_string().contains("a host and a port"));
    thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            let connect = || loop {
                match TcpStream::connect(&at.address) {
                    Ok(stream) => return stream,
                    Err(_) => thread::yield_now(),
                }
            };
            connect().write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
            connect().write_all(&[0xff; 64]).unwrap();
            // It announces more than there is, and stays.
            let announced = [&4u32.to_le_bytes()[..], &u64::MAX.to_le_bytes(), &[0; 100]].concat();
            let stays = connect();
            (&stays).write_all(&announced).unwrap();
            drop(connect());
            let of_three = follow::<CpuBackend>(&other(1, 3), 0).unwrap_err().to_string();
            assert!(of_three.contains("it is of 3 ranks, rank 0 of 2"), "{of_three}");
            follow::<CpuBackend>(&other(1, 2), 0).unwrap();
        });
        let b = Ranks::open_across(&at, Products::default()).unwrap();
        let (x, sum) = (row(&b, 1), row(&b, 1));
        write(&b, 1, &x, &[3.0]);
        b.run(|ops| ops.op(AllReduce { x, out: sum.clone(), accumulate: false }.into())).unwrap();
        assert_eq!(values(&b, 1, &sum).unwrap(), [3.0]);
        drop((sum, b));
        strangers.join().unwrap();
    });
}

#[test]
fn what_a_rank_tells_is_learnt_in_another_process() {
    let at = meeting(2);
    let members = Member::group(2, Duration::from_millis(200));
    thread::scope(|scope| {
        let rank_1 = Rendezvous { rank: 1, ..at.clone() };
        scope.spawn(move || {
            let _commands = greet::<CpuBackend>(&rank_1, Way::Commands).unwrap();
            let (meeting, _) = greet::<CpuBackend>(&rank_1, Way::Meeting).unwrap();
            let (to, failed) = (meeting.try_clone().unwrap(), Mutex::default());
            let member = Member::of(1, 2, Arc::new(There { to, from: Mutex::new(meeting), failed }));
            member.tell("1".into(), vec![1; 100_000]);
            assert_eq!(member.learn("0").unwrap(), [5]);
            assert!(member.learn("2").unwrap_err().to_string().contains("2 of another rank did not come"));
        });
        let guests = gather::<CpuBackend>(&at, &Products::default(), &members).unwrap();
        assert_eq!(members[0].learn("1").unwrap(), vec![1; 100_000]);
        members[0].tell("0".into(), vec![5]);
        drop(guests);
    });
}
