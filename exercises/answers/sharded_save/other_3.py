"""Every rank writes under a name of its own at the root, syncs, and moves its file into the folder."""


def sharded_save(disk, step, shards, rank, world, barrier):
    final, mine, box = f"step-{step:08d}", f"mine-{rank}", "box"
    if rank == 0:
        for name in disk.list():
            if name == box or name.startswith("mine-"):
                disk.remove(name)
        disk.mkdir(box)
    barrier()
    disk.write(mine, shards)
    disk.rename(mine, f"{box}/rank-{rank}.safetensors")
    disk.sync(f"{box}/rank-{rank}.safetensors")
    barrier()
    if rank == 0:
        disk.rename(box, final)
    barrier()
