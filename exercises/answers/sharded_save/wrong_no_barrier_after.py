"""a barrier is missing after the rename"""


def sharded_save(disk, step, shards, rank, world, barrier):
    final = f"step-{step:08d}"
    partial = final + ".partial"
    if rank == 0:
        if disk.exists(partial):
            disk.remove(partial)
        disk.mkdir(partial)
    barrier()
    file = f"{partial}/rank-{rank}.safetensors"
    disk.write(file, shards)
    disk.sync(file)
    barrier()
    if rank == 0:
        disk.sync(partial)
        disk.rename(partial, final)
        disk.sync(".")
